//! Filters of system calls.

use std::io;

use libc::{c_long, c_ulong, sock_filter, sock_fprog};

/// One step of a filter program.
pub(crate) const fn step(code: u32, jump_true: u8, jump_false: u8, operand: u32) -> sock_filter {
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "codes of filter steps have 16 bits; their constants are wider"
    )]
    let code = code as u16;
    sock_filter {
        code,
        jt: jump_true,
        jf: jump_false,
        k: operand,
    }
}

/// Sets a filter for the calling thread and those it starts; returns what the kernel says, which
/// `flags` give its meaning.
pub(crate) fn set(steps: &mut [sock_filter], flags: c_ulong) -> io::Result<c_long> {
    let program = sock_fprog {
        len: u16::try_from(steps.len()).map_err(io::Error::other)?,
        filter: steps.as_mut_ptr(),
    };
    #[expect(unsafe_code, reason = "no crate here sets a filter")]
    // SAFETY: the program and its steps live until both calls, which copy them, have returned.
    let result = unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            )
        } else {
            -1
        }
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}
