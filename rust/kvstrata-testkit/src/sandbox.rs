//! What a container's sandbox does to a program: system calls that fail, seccomp's way.
//!
//! Filters cannot be taken back, and what a thread starts has its filters too. A test that sets one
//! does so on a thread of its own, or is alone in its process.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::io;

use libc::{c_int, c_long, c_void, siginfo_t};

use crate::seccomp::{self, step};

/// The threads that a filter concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The calling thread and those it starts from now on.
    Thread,
    /// All threads of the process, also those that run.
    Process,
}

/// Sets a filter that answers `call` with `action` and lets everything else pass.
fn filter(call: c_long, action: u32, reach: Reach) -> io::Result<()> {
    let number = u32::try_from(call).map_err(|_| io::ErrorKind::InvalidInput)?;
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let compare = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let mut steps = [
        step(load, 0, 0, 0),
        step(compare, 0, 1, number),
        step(end, 0, 0, action),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let flags = match reach {
        Reach::Thread => 0,
        Reach::Process => libc::SECCOMP_FILTER_FLAG_TSYNC,
    };
    match seccomp::set(&mut steps, flags)? {
        0 => Ok(()),
        // With TSYNC: the number of a thread that has filters of its own.
        thread => Err(io::Error::other(format!(
            "thread {thread} has other filters"
        ))),
    }
}

/// From now on `call` fails with `errno`, also across `exec`.
///
/// # Errors
/// The kernel's, where it has no filters or permits none.
pub fn deny(call: c_long, errno: c_int, reach: Reach) -> io::Result<()> {
    let errno = u32::try_from(errno).map_err(|_| io::ErrorKind::InvalidInput)?;
    filter(call, libc::SECCOMP_RET_ERRNO | errno, reach)
}

static TRAPPED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_trapped(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    TRAPPED.fetch_add(1, Ordering::SeqCst);
}

/// From now on `call` is counted, on every thread of the process, instead of being made; what it
/// returns is then without meaning. For a process that counts one call only.
///
/// # Errors
/// The kernel's, where it has no filters or permits none.
pub fn count_instead(call: c_long) -> io::Result<()> {
    #[expect(
        unsafe_code,
        reason = "no crate here hands a handler its signal's details"
    )]
    // SAFETY: the handler only adds to an atomic, which a handler may do; an all-zero `sigaction`
    // is an empty mask and no flags.
    let result = unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = count_trapped;
        #[expect(clippy::as_conversions, reason = "how C has a handler's address")]
        let address = handler as libc::sighandler_t;
        action.sa_sigaction = address;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &raw const action, core::ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    filter(call, libc::SECCOMP_RET_TRAP, Reach::Process)
}

/// How often the call given to [`count_instead`] was tried.
pub fn counted() -> usize {
    TRAPPED.load(Ordering::SeqCst)
}
