//! A process that is killed before one of the changes it makes to files, counted from its start.
//!
//! The kernel asks a thread of the process before each such system call whether it may go on
//! (seccomp's user notification); that thread kills the process instead when the time has come.

use core::mem::zeroed;
use core::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use libc::{c_long, sock_filter};

use crate::seccomp::{self, step};

/// Calls that change files; `openat` too, where it creates one.
const CHANGES: [c_long; 12] = [
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_io_uring_enter,
];

/// Where a filter finds the number of a call, and the lower half of the third argument.
const NUMBER: u32 = 0;
const THIRD_ARGUMENT: u32 = 32;

/// Asks about each of [`CHANGES`] and lets everything else pass.
fn program() -> io::Result<Vec<sock_filter>> {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let any_bit = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let number = |call: c_long| u32::try_from(call).map_err(io::Error::other);
    let mut steps = vec![step(load, 0, 0, NUMBER)];
    // Behind the list: three steps for openat, one that lets pass, one that asks.
    for (left, call) in (0..CHANGES.len()).rev().zip(CHANGES) {
        let to_asking = u8::try_from(left + 4).map_err(io::Error::other)?;
        steps.push(step(equal, to_asking, 0, number(call)?));
    }
    let creates = u32::try_from(libc::O_CREAT).map_err(io::Error::other)?;
    steps.push(step(equal, 0, 2, number(libc::SYS_openat)?));
    steps.push(step(load, 0, 0, THIRD_ARGUMENT));
    steps.push(step(any_bit, 1, 0, creates));
    steps.push(step(end, 0, 0, libc::SECCOMP_RET_ALLOW));
    steps.push(step(end, 0, 0, libc::SECCOMP_RET_USER_NOTIF));
    Ok(steps)
}

/// From now on the calling thread, and those it starts, ask before each change; the process is
/// killed before the one of this number (the first is 0). Returns the count of changes so far.
///
/// # Errors
/// The kernel's, where it has no such filters or permits none.
pub fn kill_before(change: u64) -> io::Result<Arc<AtomicU64>> {
    let counter = Arc::new(AtomicU64::new(0));
    let (sender, receiver) = channel();
    let own = Arc::clone(&counter);
    // Started before the filter is set, so that it is not asked itself.
    std::thread::Builder::new()
        .name("crash-point".to_owned())
        .spawn(move || answer(&receiver, change, &own))?;
    let mut steps = program()?;
    let listener = seccomp::set(&mut steps, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
    let listener = i32::try_from(listener).map_err(io::Error::other)?;
    #[expect(unsafe_code, reason = "the kernel has made a descriptor")]
    // SAFETY: it is open and nobody else's.
    let listener = unsafe { OwnedFd::from_raw_fd(listener) };
    sender.send(listener).map_err(io::Error::other)?;
    Ok(counter)
}

/// Answers the kernel for as long as the process lives.
fn answer(listeners: &Receiver<OwnedFd>, kill_at: u64, counter: &AtomicU64) {
    let Ok(listener) = listeners.recv() else {
        return;
    };
    loop {
        #[expect(unsafe_code, reason = "no crate here speaks this protocol")]
        // SAFETY: both structures are plain numbers, for which all zeros are valid, and what the
        // kernel wants to be given; both live during the calls, which write or read one of them.
        unsafe {
            let mut asked: libc::seccomp_notif = zeroed();
            let listener = listener.as_raw_fd();
            if libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) != 0 {
                // Whoever asked is gone, or a signal came.
                continue;
            }
            if counter.fetch_add(1, Ordering::SeqCst) == kill_at {
                libc::kill(libc::getpid(), libc::SIGKILL);
                return;
            }
            let mut go_on: libc::seccomp_notif_resp = zeroed();
            go_on.id = asked.id;
            go_on.flags = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap_or(1);
            libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut go_on);
        }
    }
}
