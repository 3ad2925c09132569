//! `without CALL ERRNO COMMAND...`: runs a command for which a system call fails.
//!
//! `CALL` is `io_uring_setup` or `io_uring_enter`, `ERRNO` is `EPERM` or `ENOSYS`.

use std::error::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;

use kvstrata_testkit::sandbox::{Reach, deny};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || {
        arguments
            .next()
            .ok_or("usage: without CALL ERRNO COMMAND...")
    };
    let call = match next()?.as_str() {
        "io_uring_setup" => libc::SYS_io_uring_setup,
        "io_uring_enter" => libc::SYS_io_uring_enter,
        other => return Err(format!("no call {other:?} is known").into()),
    };
    let errno = match next()?.as_str() {
        "EPERM" => libc::EPERM,
        "ENOSYS" => libc::ENOSYS,
        other => return Err(format!("no errno {other:?} is known").into()),
    };
    let program = next()?;
    deny(call, errno, Reach::Thread)?;
    // Returns only when the program cannot be run.
    Err(Command::new(program).args(arguments).exec().into())
}
