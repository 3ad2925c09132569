//! The honest reference through `io_uring`: the same operations from one thread, no product around
//! them.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};
use kvstrata_core::buffer::Arena;
use kvstrata_core::io::Direction;
use kvstrata_core::sys::fs::{File, IoVector};

use crate::check::Check;
use crate::count;
use crate::ground::Move;

/// Moves rows of `row_bytes` through one ring that is kept `depth` deep, summing up each before it
/// is written or after it was read; false when an operation moved less than a row, or there is no
/// `io_uring`.
pub fn run(
    file: &File,
    arena: &Arena,
    direction: Direction,
    row_bytes: usize,
    moves: &[Move],
    depth: u32,
    check: Option<&Check>,
) -> bool {
    let vectors: Vec<IoVector> = moves
        .iter()
        .map(|(slot, _)| IoVector::new(arena.base().wrapping_add(*slot), row_bytes))
        .collect();
    let driver = Driver {
        file,
        direction,
        moves,
        vectors: &vectors,
        check,
    };
    driver.run(depth).is_ok()
}

struct Driver<'a> {
    file: &'a File,
    direction: Direction,
    moves: &'a [Move],
    vectors: &'a [IoVector],
    check: Option<&'a Check>,
}

impl Driver<'_> {
    fn run(&self, depth: u32) -> io::Result<()> {
        let mut builder = IoUring::builder();
        builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_clamp();
        let mut ring: IoUring = builder.build(depth)?;
        let deep = usize::try_from(depth).unwrap_or(1);
        let (mut started, mut done) = (0_usize, 0_usize);
        let mut short = false;
        while done < self.moves.len() {
            while started < self.moves.len() && started - done < deep {
                let entry = self.entry(started).ok_or(io::ErrorKind::InvalidInput)?;
                #[expect(unsafe_code, reason = "the reference makes the engine's own calls")]
                // SAFETY: file, vectors and arena outlive this function, no two slots overlap,
                // and it returns after every completion, or with the ring: dropping that waits
                // for them.
                unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
                started += 1;
                if self.check.is_some() && self.direction == Direction::Write {
                    // The device does not wait while the next row is summed up.
                    ring.submit()?;
                }
            }
            ring.submit_and_wait(1)?;
            let ended: Vec<(u64, i32)> = ring
                .completion()
                .map(|completion| (completion.user_data(), completion.result()))
                .collect();
            for (number, result) in ended {
                short |= !self.is_whole(number, result);
                done += 1;
            }
        }
        if short {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The operation on a row, which is summed up if it is to be written.
    fn entry(&self, number: usize) -> Option<squeue::Entry> {
        let ((slot, offset), vector) = self.moves.get(number).zip(self.vectors.get(number))?;
        // `IoVector` is a transparent `iovec`.
        let (fd, first) = (
            Fd(self.file.as_raw_fd()),
            core::ptr::from_ref(vector).cast(),
        );
        let entry = match self.direction {
            Direction::Read => opcode::Readv::new(fd, first, 1).offset(*offset).build(),
            Direction::Write => {
                if let Some(check) = self.check {
                    check.row(*slot);
                }
                opcode::Writev::new(fd, first, 1).offset(*offset).build()
            }
        };
        Some(entry.user_data(count(number)))
    }

    /// Whether all of a row was moved; one that was read is summed up.
    fn is_whole(&self, number: u64, result: i32) -> bool {
        let Some((number, bytes)) = usize::try_from(number)
            .ok()
            .zip(usize::try_from(result).ok())
        else {
            return false;
        };
        if let (Direction::Read, Some(check)) = (self.direction, self.check)
            && let Some((slot, _)) = self.moves.get(number)
        {
            check.row(*slot);
        }
        self.vectors.get(number).map(IoVector::length) == Some(bytes)
    }
}
