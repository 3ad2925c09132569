//! The disk tier over an engine that fails, tears, stalls and holds operations.
#![expect(clippy::disallowed_methods, reason = "a test fails where these fail")]

mod tier_support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::io::{Direction, Failure};
use kvstrata_core::job::Outcome;
use kvstrata_core::tier::Seams;
use kvstrata_testkit::faulty::Fault;
use tier_support::faulty::{CAPACITY, Faulty};
use tier_support::{Harness, ROW_BYTES, key, keys, options};

#[test]
fn one_bad_row_costs_its_neighbours_nothing() {
    let mut faulty = Faulty::open(|_| {});
    let own = keys(0..16);
    assert!(
        faulty
            .harness
            .store(&own)
            .iter()
            .all(|outcome| *outcome == Outcome::Ok)
    );
    let first = Arc::new(Mutex::new(None));
    faulty.choose(move |operation| {
        // The run fails, and then the fifth of its rows alone.
        let mut first = first.lock().unwrap();
        let base = *first.get_or_insert(operation.offset);
        let whole = operation.segments.len() > 2;
        let bad = operation.offset == base + 4 * 8192;
        if whole || bad {
            Fault::Fail(Failure::Os(libc::EIO))
        } else {
            Fault::None
        }
    });
    let outcomes = faulty.harness.load(&own);
    for (at, outcome) in outcomes.iter().enumerate() {
        let expected = if at == 4 {
            Outcome::IoError
        } else {
            Outcome::Ok
        };
        assert_eq!(*outcome, expected, "row {at}");
    }
    let mut expected = vec![true; 16];
    expected[4] = false;
    assert_eq!(faulty.harness.found(&own), expected);
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.store(&own[4..5]), [Outcome::Ok]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 16]);
    assert_eq!(faulty.harness.stat("retired_rows"), 1);
}

#[test]
fn each_failure_of_a_store_has_its_outcome_and_leaves_no_row() {
    for (fault, outcome) in [
        (Fault::Fail(Failure::Os(libc::ENOSPC)), Outcome::NoSpace),
        (Fault::Fail(Failure::Os(libc::EIO)), Outcome::IoError),
        (Fault::FailAfter(Failure::Os(libc::EIO)), Outcome::IoError),
        (Fault::Tear(4096, Failure::Os(libc::EIO)), Outcome::IoError),
        (Fault::Fail(Failure::TimedOut), Outcome::Timeout),
    ] {
        let mut faulty = Faulty::open(|_| {});
        let own = keys(0..8);
        faulty.fail(Direction::Write, fault);
        assert_eq!(faulty.harness.store(&own), [outcome; 8], "{fault:?}");
        assert_eq!(faulty.harness.found(&own), [false; 8]);
        assert_eq!(faulty.harness.load(&own), [Outcome::Miss; 8]);
        faulty.choose(|_| Fault::None);
        assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 8], "{fault:?}");
        assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 8]);
    }
}

#[test]
fn a_held_load_ends_at_its_deadline_only_where_busy_slots_are_honoured() {
    let mut faulty = Faulty::open(|own| {
        own.honours_busy = true;
        own.deadline = Duration::from_millis(300);
    });
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.fail(Direction::Read, Fault::Hold);
    let job = faulty.harness.begin_load(&own);
    let result = faulty.harness.result(job);
    assert_eq!(result.outcomes, [Outcome::Timeout; 4]);
    assert_eq!(result.busy, [0, 1, 2, 3]);
    assert!(result.error.is_some());
    assert_eq!(
        faulty.harness.tier.busy_offsets().unwrap(),
        faulty.harness.offsets(4)
    );
    assert_eq!(faulty.harness.found(&own), [false; 4]);
    // What the kernel returns late says nothing about the row: its slot is not looked at.
    faulty.harness.wipe();
    faulty.engine.release();
    while !faulty.harness.tier.busy_offsets().unwrap().is_empty() {
        std::thread::yield_now();
    }
    faulty.harness.tier.drain().unwrap();
    assert_eq!(faulty.harness.stat("corrupt_rows"), 0);
    faulty.choose(|_| Fault::None);
    faulty.harness.store_all(&own);
    faulty.fail(Direction::Read, Fault::Hold);
    let job = faulty.harness.begin_load(&own);
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Timeout; 4]);
    let error = faulty
        .harness
        .tier
        .close(Duration::from_millis(200))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let lookup = faulty.harness.tier.lookup(&own).unwrap_err();
    assert_eq!(lookup.kind(), ErrorKind::Closed);
    faulty.engine.release();
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_held_load_without_busy_slots_waits_for_the_kernel() {
    let mut faulty = Faulty::open(|own| own.deadline = Duration::from_millis(200));
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.fail(Direction::Read, Fault::Hold);
    let job = faulty.harness.begin_load(&own);
    assert!(
        faulty
            .harness
            .tier
            .wait(Duration::from_millis(700))
            .unwrap()
            .is_empty()
    );
    assert!(
        !faulty
            .harness
            .tier
            .drain_for(Duration::from_millis(50))
            .unwrap()
    );
    faulty.engine.release();
    let result = faulty.harness.result(job);
    assert_eq!(
        (result.outcomes, result.busy),
        (vec![Outcome::Ok; 4], vec![])
    );
    faulty.harness.tier.drain().unwrap();
}

#[test]
fn what_was_never_started_ends_at_its_deadline_everywhere() {
    let mut faulty = Faulty::open(|own| own.deadline = Duration::from_millis(200));
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.choose(|_| Fault::Stall);
    let load = faulty.harness.begin_load(&own);
    assert_eq!(faulty.harness.result(load).outcomes, [Outcome::Timeout; 4]);
    assert_eq!(faulty.harness.store(&keys(10..14)), [Outcome::Timeout; 4]);
    assert_eq!(faulty.harness.found(&keys(10..14)), [false; 4]);
    assert_eq!(faulty.harness.found(&own), [false; 4]);
}

#[test]
fn a_reset_ends_every_job_in_flight() {
    let mut faulty = Faulty::open(|_| {});
    let own = keys(0..8);
    faulty.harness.store(&own);
    faulty.choose(|_| Fault::Hold);
    let load = faulty.harness.begin_load(&own[..4]);
    let store = {
        let more = keys(20..24);
        faulty.harness.fill(&[]);
        let job = faulty.harness.job();
        let offsets: Vec<u64> = faulty.harness.offsets(12)[8..].to_vec();
        faulty.harness.tier.store(job, &more, &offsets).unwrap();
        job
    };
    while faulty.engine.held() < 2 {
        std::thread::yield_now();
    }
    assert!(faulty.harness.tier.reset().unwrap());
    assert!(faulty.harness.tier.reset().unwrap());
    faulty.engine.release();
    let mut results = Vec::new();
    while results.len() < 2 {
        results.extend(faulty.harness.tier.wait(Duration::from_secs(5)).unwrap());
    }
    results.sort_by_key(|result| result.job_id);
    assert_eq!(results[0].job_id, load);
    assert_eq!(results[0].outcomes, [Outcome::Miss; 4]);
    assert_eq!(results[1].job_id, store);
    assert_eq!(results[1].outcomes, [Outcome::Dropped; 4]);
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.found(&own), [false; 8]);
    assert_eq!(faulty.harness.found(&keys(20..24)), [false; 4]);
    assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 8]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 8]);
}

#[test]
fn a_key_removed_while_it_is_stored_is_never_seen_and_may_be_stored_again() {
    let mut faulty = Faulty::open(|_| {});
    let own = [key(1, 0)];
    faulty.fail(Direction::Write, Fault::Hold);
    let first = faulty.harness.begin_store(&own);
    while faulty.engine.held() < 1 {
        std::thread::yield_now();
    }
    faulty.harness.tier.remove(&own).unwrap();
    let second = faulty.harness.begin_store(&own);
    while faulty.engine.held() < 2 {
        std::thread::yield_now();
    }
    faulty.engine.release();
    let mut results = Vec::new();
    while results.len() < 2 {
        results.extend(faulty.harness.tier.wait(Duration::from_secs(5)).unwrap());
    }
    results.sort_by_key(|result| result.job_id);
    assert_eq!((results[0].job_id, results[1].job_id), (first, second));
    assert_eq!(results[0].outcomes, [Outcome::Dropped]);
    assert_eq!(results[1].outcomes, [Outcome::Ok]);
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok]);
}

#[test]
fn two_stores_of_one_key_end_as_one_write() {
    let mut faulty = Faulty::open(|_| {});
    let own = [key(1, 0)];
    faulty.fail(Direction::Write, Fault::Hold);
    let first = faulty.harness.begin_store(&own);
    while faulty.engine.held() < 1 {
        std::thread::yield_now();
    }
    let second = faulty.harness.begin_store(&own);
    // The second one is planned before the first one's write comes back.
    while faulty.harness.stat("queued_stores") > 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(faulty.engine.held(), 1);
    faulty.engine.release();
    let mut outcomes = Vec::new();
    while outcomes.len() < 2 {
        for result in faulty.harness.tier.wait(Duration::from_secs(5)).unwrap() {
            outcomes.push((result.job_id, result.outcomes));
        }
    }
    outcomes.sort_by_key(|(job, _)| *job);
    assert_eq!(
        outcomes,
        [(first, vec![Outcome::Ok]), (second, vec![Outcome::Present])]
    );
}

#[test]
fn a_panic_in_the_engine_ends_jobs_and_keeps_the_tier_answering() {
    let mut faulty = Faulty::open(|_| {});
    let own = keys(0..4);
    faulty.harness.store(&own);
    faulty.fail(Direction::Read, Fault::Fail(Failure::Poisoned));
    let outcomes = faulty.harness.load(&own);
    assert_eq!(outcomes, [Outcome::IoError; 4]);
    assert_eq!(faulty.harness.found(&own), [false; 4]);
    assert_eq!(faulty.harness.stat("retired_rows"), 0);
    // A panic is no device's failure: no trial could make it good.
    for _ in 0..10 {
        faulty.harness.store(&own[..1]);
        assert_eq!(faulty.harness.load(&own[..1]), [Outcome::IoError]);
    }
    assert_eq!(faulty.harness.stat("circuit_openings"), 0);
}

#[test]
fn a_panic_while_rows_are_summed_up_drops_every_store_and_leaves_nothing_behind() {
    let mut faulty = Faulty::open(|_| {});
    let stored = keys(0..8);
    assert_eq!(faulty.harness.store(&stored), [Outcome::Ok; 8]);
    faulty.fail(Direction::Write, Fault::Panic);
    let (first, second) = (keys(10..40), keys(50..60));
    let jobs = [
        faulty.harness.begin_store_at(0, &first),
        faulty.harness.begin_store_at(30, &second),
    ];
    let results = faulty.harness.results(&jobs);
    assert_eq!(results[0].outcomes, [Outcome::Dropped; 30]);
    assert_eq!(results[1].outcomes, [Outcome::Dropped; 10]);
    assert_eq!(faulty.harness.found(&first), [false; 30]);
    let stats = faulty.harness.tier.stats().unwrap();
    assert_eq!(stats["health"], "poisoned");
    assert_eq!(stats["circuit_openings"], 0);
    faulty.harness.assert_quiet();
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
    let mut next = Harness::open(options(faulty.root.path(), ROW_BYTES, CAPACITY), 64);
    assert_eq!(next.found(&[first, second].concat()), [false; 40]);
    assert_eq!(next.load(&stored), [Outcome::Ok; 8]);
    assert_eq!(next.stat("rows"), 8);
    assert_eq!(next.store(&keys(70..80)), [Outcome::Ok; 10]);
    assert_eq!(next.load(&keys(70..80)), [Outcome::Ok; 10]);
}

/// The machine's clock, but asking it for an access time on the writer thread panics once armed.
#[derive(Debug, Default)]
struct PanicsOnWriter {
    armed: std::sync::atomic::AtomicBool,
}

impl kvstrata_core::sys::clock::Clock for PanicsOnWriter {
    fn now(&self) -> std::time::Instant {
        std::time::Instant::now()
    }

    fn unix_seconds(&self) -> u32 {
        let writer = std::thread::current().name() == Some("kvstrata-writer");
        let now = writer && self.armed.swap(false, std::sync::atomic::Ordering::SeqCst);
        assert!(!now, "on purpose");
        1
    }

    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

#[test]
fn a_panic_of_the_writer_ends_every_store_and_loads_go_on() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let clock = Arc::new(PanicsOnWriter::default());
    let seams = Seams {
        clock: Arc::<PanicsOnWriter>::clone(&clock),
        ..Seams::default()
    };
    let mut harness = Harness::open_with(options(root.path(), ROW_BYTES, CAPACITY), 1000, seams);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    clock.armed.store(true, std::sync::atomic::Ordering::SeqCst);
    let first = harness.begin_store(&keys(10..900));
    let result = harness.result(first);
    assert_eq!(result.outcomes, vec![Outcome::Dropped; 890]);
    assert_eq!(harness.store(&keys(2000..2004)), [Outcome::Dropped; 4]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&keys(10..14)), [Outcome::Miss; 4]);
    assert_eq!(harness.tier.stats().unwrap()["health"], "poisoned");
    harness.tier.drain().unwrap();
    harness.tier.close(Duration::from_secs(10)).unwrap();
}
