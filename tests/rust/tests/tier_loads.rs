//! Loads of rows that are being read already, and what becomes of them when the read fails.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::io::{Direction, Failure};
use kvstrata_core::job::Outcome;
use kvstrata_testkit::faulty::Fault;
use tier_support::faulty::{Faulty, Mount};
use tier_support::{ROW_BYTES, key, keys, row_files};

/// Rows lie this far apart in their file, in bytes.
const STRIDE: u64 = 8192;

/// Flips a bit of the first `count` rows of the only row file.
fn spoil_rows(root: &std::path::Path, count: u64) {
    let path = row_files(root).pop().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let rows_at = {
        let length = file.metadata().unwrap().len();
        let rows = (length - 8192) / (STRIDE + 128);
        8192 + (rows * 128).div_ceil(4096) * 4096
    };
    for row in 0..count {
        file.write_all_at(b"spoilt", rows_at + row * STRIDE + 17)
            .unwrap();
    }
}

fn fifty_jobs_for_the_same_rows(mount: Mount) {
    let mut faulty = Faulty::open_on(mount, 5000, |_| {});
    let own = keys(0..100);
    assert_eq!(faulty.harness.store(&own), vec![Outcome::Ok; 100]);
    faulty.harness.wipe();
    let read_bytes = faulty.hold_reads();
    let mut jobs = Vec::new();
    for job in 0..50_usize {
        let slots: Vec<usize> = (job * 100..job * 100 + 100).collect();
        // Every job asks in an order of its own.
        let mut asked = own.clone();
        asked.rotate_left(job);
        jobs.push(faulty.harness.begin_load_at(&asked, &slots));
    }
    assert_eq!(read_bytes.load(Ordering::SeqCst), 100 * STRIDE);
    assert_eq!(faulty.harness.stat("coalesced_loads"), 4900);
    assert_eq!(faulty.harness.stat("rows_being_read"), 100);
    assert!(faulty.harness.tier.poll().unwrap().is_empty());
    faulty.engine.release();
    faulty.choose(|_| Fault::None);
    // What had not reached the engine's end when it was released is held still.
    while faulty.harness.stat("rows_being_read") > 0 {
        faulty.engine.release();
        std::thread::yield_now();
    }
    for (job, result) in faulty.harness.results(&jobs).into_iter().enumerate() {
        assert_eq!(result.outcomes, vec![Outcome::Ok; 100], "job {job}");
        assert_eq!(result.bytes, 100 * u64::try_from(ROW_BYTES).unwrap());
        for slot in 0..100 {
            let key = &own[(slot + job) % 100];
            assert!(faulty.harness.holds(job * 100 + slot, key), "job {job}");
        }
    }
    assert_eq!(read_bytes.load(Ordering::SeqCst), 100 * STRIDE);
    faulty.harness.assert_quiet();
}

#[test]
fn fifty_jobs_for_the_same_hundred_rows_read_each_row_once() {
    fifty_jobs_for_the_same_rows(Mount::Local);
}

#[test]
fn fifty_jobs_for_the_same_hundred_rows_read_each_row_once_through_buffers() {
    fifty_jobs_for_the_same_rows(Mount::MayHang);
}

#[test]
fn a_failed_read_is_a_miss_for_everyone_who_waits_for_it() {
    for (mount, failure, outcome) in [
        (Mount::Local, Failure::Os(libc::EIO), Outcome::IoError),
        (Mount::Local, Failure::Os(libc::ENOENT), Outcome::Miss),
        (Mount::Local, Failure::Short, Outcome::Miss),
        (Mount::Local, Failure::TimedOut, Outcome::Timeout),
        (Mount::Local, Failure::Poisoned, Outcome::IoError),
        (Mount::MayHang, Failure::Os(libc::EIO), Outcome::IoError),
        (Mount::MayHang, Failure::TimedOut, Outcome::Timeout),
    ] {
        let mut faulty = Faulty::open_on(mount, 64, |_| {});
        let own = keys(0..4);
        faulty.harness.store(&own);
        faulty.fail(Direction::Read, Fault::Stall);
        let jobs = [
            faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]),
            faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]),
            faulty.harness.begin_load_at(&own[2..], &[8, 9]),
        ];
        assert_eq!(faulty.harness.stat("coalesced_loads"), 6);
        faulty.fail(Direction::Read, Fault::Fail(failure));
        faulty.engine.submit_stalled_again();
        let results = faulty.harness.results(&jobs);
        assert_eq!(results[0].outcomes, [outcome; 4], "{failure:?}");
        assert_eq!(results[1].outcomes, [Outcome::Miss; 4], "{failure:?}");
        assert_eq!(results[2].outcomes, [Outcome::Miss; 2], "{failure:?}");
        assert!(results.iter().all(|result| result.error.is_some()));
        assert_eq!(faulty.harness.found(&own), [false; 4], "{failure:?}");
        faulty.choose(|_| Fault::None);
        assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 4]);
        assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 4]);
        faulty.harness.assert_quiet();
    }
}

#[test]
fn corrupt_rows_are_counted_once_however_many_wait_for_them() {
    for mount in [Mount::Local, Mount::MayHang] {
        let mut faulty = Faulty::open_on(mount, 64, |_| {});
        let own = keys(0..4);
        faulty.harness.store(&own);
        spoil_rows(faulty.root.path(), 2);
        faulty.hold_reads();
        let jobs = [
            faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]),
            faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]),
        ];
        faulty.wait_held(1);
        faulty.choose(|_| Fault::None);
        faulty.engine.release();
        let results = faulty.harness.results(&jobs);
        let (bad, good) = (Outcome::Corrupt, Outcome::Ok);
        assert_eq!(results[0].outcomes, [bad, bad, good, good]);
        assert_eq!(
            results[1].outcomes,
            [Outcome::Miss, Outcome::Miss, good, good]
        );
        assert!(faulty.harness.holds(6, &own[2]) && faulty.harness.holds(7, &own[3]));
        assert_eq!(faulty.harness.stat("corrupt_rows"), 2);
        assert_eq!(faulty.harness.found(&own), [false, false, true, true]);
        faulty.harness.assert_quiet();
    }
}

#[test]
fn a_bad_row_costs_its_neighbours_nothing_whatever_the_failure() {
    for mount in [Mount::Local, Mount::MayHang] {
        for (failure, outcome) in [
            (Failure::Os(libc::EIO), Outcome::IoError),
            (Failure::Os(libc::ENOSPC), Outcome::IoError),
            (Failure::Os(libc::ETIMEDOUT), Outcome::IoError),
            (Failure::Os(libc::ECANCELED), Outcome::IoError),
        ] {
            let mut faulty = Faulty::open_on(mount, 64, |_| {});
            let own = keys(0..5);
            faulty.harness.store(&own);
            let mut first = None;
            faulty.choose(move |operation| {
                let base = *first.get_or_insert(operation.offset);
                let bad = base + 3 * STRIDE;
                let end = operation.offset + operation.bytes();
                if (operation.offset..end).contains(&bad) {
                    Fault::Fail(failure)
                } else {
                    Fault::None
                }
            });
            faulty.harness.wipe();
            let jobs = [
                faulty.harness.begin_load_at(&own, &[0, 1, 2, 3, 4]),
                faulty.harness.begin_load_at(&own, &[5, 6, 7, 8, 9]),
            ];
            let results = faulty.harness.results(&jobs);
            for (slot, (row, key)) in (0..10).zip((0..5).zip(&own).cycle()) {
                let found = results[slot / 5].outcomes[row];
                if row == 3 {
                    assert!([outcome, Outcome::Miss].contains(&found), "{failure:?}");
                } else {
                    assert_eq!(found, Outcome::Ok, "{failure:?}, row {row}");
                    assert!(faulty.harness.holds(slot, key));
                }
            }
            assert_eq!(results[0].outcomes[3], outcome);
            assert!(results.iter().all(|result| !result.success()));
            assert_eq!(faulty.harness.found(&own), [true, true, true, false, true]);
            faulty.harness.assert_quiet();
        }
    }
}

#[test]
fn a_load_that_found_its_file_cut_is_not_tried_again_until_the_row_is_stored() {
    let mut faulty = Faulty::open(|_| {});
    let own = [key(1, 0)];
    faulty.harness.store(&own);
    assert_eq!(faulty.harness.found(&own), [true]);
    let path = row_files(faulty.root.path()).pop().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(8192 + 4096).unwrap();
    let reads = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = std::sync::Arc::clone(&reads);
    faulty.choose(move |operation| {
        let read = operation.direction == Direction::Read;
        counter.fetch_add(u64::from(read), Ordering::SeqCst);
        Fault::None
    });
    assert_eq!(faulty.harness.load(&own), [Outcome::Miss]);
    assert_eq!(reads.load(Ordering::SeqCst), 1);
    for _ in 0..10 {
        assert_eq!(faulty.harness.found(&own), [false]);
        assert_eq!(faulty.harness.load(&own), [Outcome::Miss]);
    }
    assert_eq!(
        reads.load(Ordering::SeqCst),
        1,
        "a doomed load was repeated"
    );
    assert_eq!(faulty.harness.store(&own), [Outcome::Ok]);
    assert_eq!(faulty.harness.found(&own), [true]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok]);
    assert_eq!(reads.load(Ordering::SeqCst), 2);
}

#[test]
fn a_late_failure_of_an_old_row_says_nothing_about_the_row_stored_since() {
    for mount in [Mount::Local, Mount::MayHang] {
        let mut faulty = Faulty::open_on(mount, 64, |_| {});
        let own = [key(1, 0)];
        faulty.harness.store(&own);
        spoil_rows(faulty.root.path(), 1);
        faulty.hold_reads();
        let old = faulty.harness.begin_load_at(&own, &[0]);
        faulty.wait_held(1);
        faulty.harness.tier.remove(&own).unwrap();
        faulty.choose(|_| Fault::None);
        faulty.harness.fill(&[]);
        let store = faulty.harness.job();
        let bytes = kvstrata_testkit::payload::payload(own[0].as_bytes(), ROW_BYTES);
        assert!(faulty.harness.arena.copy_in(ROW_BYTES, &bytes));
        let at = u64::try_from(ROW_BYTES).unwrap();
        faulty.harness.tier.store(store, &own, &[at]).unwrap();
        assert_eq!(faulty.harness.result(store).outcomes, [Outcome::Ok]);
        faulty.engine.release();
        let outcome = faulty.harness.result(old).outcomes[0];
        assert!([Outcome::Corrupt, Outcome::Miss].contains(&outcome));
        assert_eq!(faulty.harness.found(&own), [true]);
        assert_eq!(faulty.harness.load(&own), [Outcome::Ok]);
        faulty.harness.assert_quiet();
    }
}

#[test]
fn a_row_stored_again_is_read_for_itself_while_the_old_one_is_still_being_read() {
    let mut faulty = Faulty::open(|_| {});
    let own = [key(1, 0)];
    faulty.harness.store(&own);
    let read_bytes = faulty.hold_reads();
    let old = faulty.harness.begin_load_at(&own, &[0]);
    faulty.harness.tier.remove(&own).unwrap();
    let missed = faulty.harness.begin_load_at(&own, &[1]);
    assert_eq!(faulty.harness.result(missed).outcomes, [Outcome::Miss]);
    let bytes = kvstrata_testkit::payload::payload(own[0].as_bytes(), ROW_BYTES);
    assert!(faulty.harness.arena.copy_in(2 * ROW_BYTES, &bytes));
    let store = faulty.harness.job();
    let at = u64::try_from(2 * ROW_BYTES).unwrap();
    faulty.harness.tier.store(store, &own, &[at]).unwrap();
    assert_eq!(faulty.harness.result(store).outcomes, [Outcome::Ok]);
    let new = faulty.harness.begin_load_at(&own, &[3]);
    assert_eq!(read_bytes.load(Ordering::SeqCst), 2 * STRIDE);
    assert_eq!(faulty.harness.stat("coalesced_loads"), 0);
    faulty.wait_held(2);
    faulty.engine.release();
    let results = faulty.harness.results(&[old, new]);
    assert_eq!(
        results[0].outcomes,
        [Outcome::Ok],
        "it was there when asked"
    );
    assert_eq!(results[1].outcomes, [Outcome::Ok]);
    assert!(faulty.harness.holds(0, &own[0]) && faulty.harness.holds(3, &own[0]));
    faulty.harness.assert_quiet();
}

#[test]
fn a_reset_makes_everyone_who_waits_miss() {
    for mount in [Mount::Local, Mount::MayHang] {
        let mut faulty = Faulty::open_on(mount, 64, |_| {});
        let own = keys(0..4);
        faulty.harness.store(&own);
        faulty.hold_reads();
        let jobs = [
            faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]),
            faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]),
        ];
        faulty.wait_held(1);
        assert!(faulty.harness.tier.reset().unwrap());
        faulty.engine.release();
        for result in faulty.harness.results(&jobs) {
            assert_eq!(result.outcomes, [Outcome::Miss; 4]);
        }
        faulty.choose(|_| Fault::None);
        assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 4]);
        assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 4]);
        faulty.harness.assert_quiet();
    }
}

#[test]
fn a_waiting_load_ends_at_its_own_deadline_though_the_read_it_waits_for_goes_on() {
    let mut faulty = Faulty::open(|own| own.deadline = Duration::from_millis(400));
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    let first = faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_millis(100));
    let second = faulty.harness.begin_load_at(&own[..2], &[4, 5]);
    let result = faulty.harness.result(second);
    assert_eq!(result.outcomes, [Outcome::Timeout; 2]);
    assert_eq!(result.busy, Vec::<usize>::new(), "the kernel never had it");
    assert_eq!(faulty.harness.found(&own), [false, false, true, true]);
    // Its slots are another's now.
    assert!(
        faulty
            .harness
            .arena
            .copy_in(4 * ROW_BYTES, &[7; 2 * ROW_BYTES])
    );
    faulty.engine.release();
    assert_eq!(faulty.harness.result(first).outcomes, [Outcome::Ok; 4]);
    let slots = faulty.harness.arena.bytes(4 * ROW_BYTES, 2 * ROW_BYTES);
    assert!(slots.unwrap().iter().all(|byte| *byte == 7));
    faulty.harness.assert_quiet();
}

#[test]
fn who_waits_for_a_read_that_is_given_up_misses_at_once() {
    let mut faulty = Faulty::open(|own| {
        own.honours_busy = true;
        own.deadline = Duration::from_millis(500);
    });
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    let first = faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_millis(250));
    let second = faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]);
    let results = faulty.harness.results(&[first, second]);
    assert_eq!(results[0].outcomes, [Outcome::Timeout; 4]);
    assert_eq!(results[0].busy, [0, 1, 2, 3]);
    assert_eq!(results[1].outcomes, [Outcome::Miss; 4]);
    assert_eq!(results[1].busy, Vec::<usize>::new());
    assert_eq!(faulty.harness.found(&own), [false; 4]);
    faulty.engine.release();
    while !faulty.harness.tier.busy_offsets().unwrap().is_empty() {
        std::thread::yield_now();
    }
    faulty.harness.assert_quiet();
}

#[test]
fn a_tier_closes_with_loads_waiting_for_a_read_once_the_kernel_has_returned_it() {
    let mut faulty = Faulty::open(|_| {});
    let own = keys(0..4);
    faulty.harness.store(&own);
    faulty.hold_reads();
    faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]);
    faulty.wait_held(1);
    let busy = faulty.harness.tier.close(Duration::from_millis(100));
    assert_eq!(busy.unwrap_err().kind(), ErrorKind::Busy);
    faulty.engine.release();
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
    // Nothing is written to the arena any more.
    faulty.harness.wipe();
    std::thread::sleep(Duration::from_millis(100));
    let all = faulty.harness.arena.bytes(0, faulty.harness.arena.length());
    assert!(all.unwrap().iter().all(|byte| *byte == 0xEE));
}

#[test]
fn loads_beyond_the_arenas_length_are_refused_as_misses_and_lose_no_row() {
    let mut faulty = Faulty::open(|_| {});
    let own = keys(0..40);
    faulty.harness.store(&own);
    let read_bytes = faulty.hold_reads();
    let slots: Vec<usize> = (0..40).collect();
    let first = faulty.harness.begin_load_at(&own, &slots);
    // A caller that gives the slots of running jobs away may ask for more than there is.
    for _ in 0..1000 {
        let more = faulty.harness.begin_load_at(&own, &slots);
        let result = faulty.harness.result(more);
        assert_eq!(result.outcomes, vec![Outcome::Miss; 40]);
        assert!(result.error.unwrap().contains("too many bytes"));
    }
    assert_eq!(faulty.harness.stat("refused_loads"), 40_000);
    let row_bytes = u64::try_from(ROW_BYTES).unwrap();
    assert_eq!(faulty.harness.stat("load_bytes_open"), 40 * row_bytes);
    assert_eq!(read_bytes.load(Ordering::SeqCst), 40 * STRIDE);
    let rest = faulty.harness.begin_load_at(&own[..24], &slots[..24]);
    assert_eq!(faulty.harness.stat("load_bytes_open"), 64 * row_bytes);
    faulty.wait_held(1);
    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    let results = faulty.harness.results(&[first, rest]);
    assert_eq!(results[0].outcomes, vec![Outcome::Ok; 40]);
    assert_eq!(results[1].outcomes, vec![Outcome::Ok; 24]);
    assert_eq!(faulty.harness.found(&own), vec![true; 40]);
    faulty.harness.assert_quiet();
}
