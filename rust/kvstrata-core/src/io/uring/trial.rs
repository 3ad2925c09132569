//! Whether a ring works here.

use std::collections::VecDeque;
use std::io;

use super::ring::{FIRST_TOKEN, Ring, Wake};
use crate::buffer::AlignedBuffer;
use crate::buffer::aligned::PAGE_BYTES;
use crate::io::transfer::{Request, Transfer};
use crate::io::{Alignment, Direction};
use crate::sys::fs::{Direct, File, IoVector};
use crate::sys::sync::Arc;

/// Sets a ring up and takes it down again.
///
/// # Errors
/// The kernel's.
pub fn trial_set_up() -> io::Result<()> {
    Ring::new(4, Arc::new(Wake::new()?)).map(drop)
}

/// Sets a ring up, reads the first bytes of `file` through it and takes it down again.
///
/// # Errors
/// The kernel's, of whatever part it refuses; `UnexpectedEof` when nothing is read.
pub fn trial(file: &File) -> io::Result<()> {
    let mut ring = Ring::new(4, Arc::new(Wake::new()?))?;
    let buffer = AlignedBuffer::zeroed(PAGE_BYTES, PAGE_BYTES);
    let buffer = buffer.map_err(|_| io::ErrorKind::OutOfMemory)?;
    let transfer = Transfer::new(Request {
        direction: Direction::Read,
        vectors: vec![IoVector::new(buffer.base(), buffer.len())],
        offset: 0,
        alignment: Alignment::NONE,
        direct: Direct::No,
    });
    #[expect(unsafe_code, reason = "the kernel gets the buffer")]
    // SAFETY: the caller's file is open until this returns; buffer and transfer are unshared, and
    // leaked unless the read was never handed over or has been returned.
    let pushed = unsafe { ring.push_transfer(FIRST_TOKEN, file, &transfer) };
    let mut answers = VecDeque::new();
    let mut waited = if pushed {
        ring.wait(None)
    } else {
        Err(io::ErrorKind::WouldBlock.into())
    };
    ring.reap(&mut answers);
    while answers.is_empty()
        && matches!(&waited, Err(error) if error.kind() == io::ErrorKind::Interrupted)
    {
        waited = ring.wait(None);
        ring.reap(&mut answers);
    }
    match answers.pop_front() {
        Some((_, 1..)) => Ok(()),
        Some((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Some((_, errno)) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
        None if ring.has_unsubmitted() => waited,
        None => {
            core::mem::forget((ring, buffer, transfer));
            waited.and_then(|()| Err(io::ErrorKind::TimedOut.into()))
        }
    }
}
