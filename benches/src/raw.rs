//! The honest reference: the same calls from plain threads, with no product around them.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvstrata_core::buffer::Arena;
use kvstrata_core::io::Direction;
use kvstrata_core::sys::fs::{File, IoVector};

use crate::check::Check;
use crate::ground::Move;

/// Moves rows of `row_bytes` with `preadv`/`pwritev` from `threads` threads, each of which sums up
/// its rows before it writes or after it reads them; false when a call moved less than a row.
pub fn run(
    file: &File,
    arena: &Arena,
    direction: Direction,
    row_bytes: usize,
    moves: &[Move],
    threads: usize,
    check: Option<&Check>,
) -> bool {
    let next = AtomicUsize::new(0);
    let short = AtomicUsize::new(0);
    let body = || {
        while let Some((slot, offset)) = moves.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(check) = check.filter(|_| direction == Direction::Write) {
                check.row(*slot);
            }
            let vector = [IoVector::new(arena.base().wrapping_add(*slot), row_bytes)];
            #[expect(unsafe_code, reason = "the reference makes the engine's own calls")]
            // SAFETY: the moves' slots lie within the arena, which is never freed, and no two of
            // them overlap.
            let done = unsafe {
                match direction {
                    Direction::Read => file.read_vectored_at(&vector, *offset),
                    Direction::Write => file.write_vectored_at(&vector, *offset),
                }
            };
            if let Some(check) = check.filter(|_| direction == Direction::Read) {
                check.row(*slot);
            }
            if done.ok() != Some(row_bytes) {
                short.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(body);
        }
    });
    short.into_inner() == 0
}
