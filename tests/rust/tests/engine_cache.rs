//! What rows that go through the page cache leave there.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::os::fd::AsRawFd;
use std::time::Duration;

use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::io::Direction;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;

const ROW: usize = 1 << 20;
const ROWS: usize = 64;

/// Number of the system call in the kernel's table for all architectures.
const CACHESTAT: libc::c_long = 451;

/// Bytes of a file in the page cache; None before Linux 6.5.
fn cached_bytes(root: &Root) -> Option<u64> {
    let file = root
        .directory
        .open("rows", Access::Read, Direct::No)
        .unwrap();
    let whole = [0_u64, 0];
    let mut pages = [0_u64; 5];
    #[expect(unsafe_code, reason = "no crate here wraps this call")]
    // SAFETY: the kernel reads two and writes five numbers of 64 bits, and these are they.
    let result = unsafe {
        libc::syscall(
            CACHESTAT,
            file.as_raw_fd(),
            whole.as_ptr(),
            pages.as_mut_ptr(),
            0,
        )
    };
    let [cached, ..] = pages;
    (result == 0).then_some(cached * 4096)
}

fn what_stays_is_little(rows: u64) {
    for kind in Kind::ALL {
        let root = Root::disk();
        let completions = Completions::default();
        let row_bytes = u64::try_from(ROW).unwrap();
        let file = root.file("rows", rows * row_bytes);
        let arena = leaked_arena(ROWS * ROW, 0).unwrap();
        let engine = kind.start_with_small_cache(completions.sink());
        for (pass, direction) in [(0, Direction::Write), (1, Direction::Read)] {
            for first in (0..rows).step_by(ROWS) {
                let one = |row: u64| {
                    let slot = usize::try_from(row).unwrap() % ROWS * ROW;
                    let segments = vec![segment(&arena, slot, ROW)];
                    let id = pass * rows + row;
                    operation(id, direction, &file, row * row_bytes, segments)
                };
                let last = rows.min(first + u64::try_from(ROWS).unwrap());
                engine.submit((first..last).map(one).collect());
                let count = usize::try_from(last - first).unwrap();
                let done = completions.wait(count, 10 * SOON);
                assert_eq!(done.len(), count);
                assert!(done.iter().all(|one| one.result == Ok(())));
            }
            let Some(mut cached) = cached_bytes(&root) else {
                return;
            };
            // The ring's errands come a little after its completions. What was written last is
            // read first, or not at all: it may stay.
            let until = SystemClock.now() + SOON;
            while cached > 33 << 20 && SystemClock.now() < until {
                SystemClock.sleep(Duration::from_millis(20));
                cached = cached_bytes(&root).unwrap();
            }
            assert!(cached <= 33 << 20, "{kind:?} {direction:?}: {cached}");
        }
        assert!(engine.shutdown(SOON));
    }
}

#[test]
fn of_rows_that_go_through_the_page_cache_33_mib_stay_there_at_most() {
    what_stays_is_little(128);
}

#[test]
#[ignore = "writes and reads 2 GiB twice"]
fn of_two_gib_that_go_through_the_page_cache_33_mib_stay_there_at_most() {
    what_stays_is_little(2048);
}
