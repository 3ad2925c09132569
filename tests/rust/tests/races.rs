//! Job table and tier, used by several threads as fast as they can: for a thread sanitizer, which sees
//! an access that no lock orders, whether or not it does harm. Threads here meet in the tier and at
//! their ends only.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod tier_support;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvstrata_core::job::{JobKind, JobTable, Outcome, Settlement};
use kvstrata_core::sys::clock::SystemClock;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use tier_support::{keys, options};

const ROW: usize = 4096;
const JOBS: u64 = 2000;
const SOON: Duration = Duration::from_mins(1);

#[test]
fn a_job_table_is_begun_settled_polled_and_waited_on_by_six_threads() {
    let table = JobTable::new(Arc::new(SystemClock)).unwrap();
    for job in 0..JOBS {
        table.begin(job, JobKind::Load, 4).unwrap();
    }
    let polled: usize = thread::scope(|scope| {
        for position in 0..4 {
            let table = &table;
            scope.spawn(move || {
                for job in 0..JOBS {
                    let settlement = Settlement {
                        position,
                        outcome: Outcome::Ok,
                        bytes: 1,
                        busy: false,
                    };
                    table.settle(job, &[settlement], None);
                }
            });
        }
        let pollers = [0, 1].map(|number| {
            let table = &table;
            scope.spawn(move || {
                let mut seen = 0;
                while table.running() + table.unpolled() > 0 {
                    let results = if number == 0 {
                        table.poll()
                    } else {
                        table.wait(Duration::from_millis(1))
                    };
                    for result in results {
                        assert!(result.success() && result.bytes == 4);
                        seen += 1;
                    }
                }
                seen
            })
        });
        pollers.map(|poller| poller.join().unwrap()).iter().sum()
    });
    assert_eq!(polled, usize::try_from(JOBS).unwrap());
}

/// Asks from three threads for loads, stores and everything else while a fourth collects.
fn use_from_all_sides(io_backend: &str) {
    const ROUNDS: u64 = 60;
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut own = options(root.path(), ROW, 2 << 20);
    io_backend.clone_into(&mut own.io_backend);
    // Each load has slots of its own.
    let slots = 16 + 8 * usize::try_from(ROUNDS).unwrap();
    let arena = leaked_arena(slots * ROW, 0).unwrap();
    let tier = Tier::open_shared(own, Arc::clone(&arena), Seams::default()).unwrap();
    let offsets = |first: u64, count: u64| -> Vec<u64> {
        (first..first + count).map(|slot| slot * 4096).collect()
    };
    // Slots 0 to 15 hold keys 0 to 15 for good, so that stores of them may overlap.
    for (slot, key) in keys(0..16).iter().enumerate() {
        assert!(arena.copy_in(slot * ROW, &payload(key.as_bytes(), ROW)));
    }
    let ended: u64 = thread::scope(|scope| {
        let (tier, offsets) = (&tier, &offsets);
        scope.spawn(move || {
            for round in 0..ROUNDS {
                let from = round % 9;
                let some = keys(from..from + 8);
                tier.store(1000 + round, &some, &offsets(from, 8)).unwrap();
                tier.touch(&some).unwrap();
            }
        });
        scope.spawn(move || {
            for round in 0..ROUNDS {
                let some = keys((0..8).map(|at| (at * 3 + round) % 16));
                let slots = offsets(16 + round * 8, 8);
                tier.load(2000 + round, &some, &slots).unwrap();
                assert_eq!(tier.lookup(&some).unwrap().len(), 8);
            }
        });
        scope.spawn(move || {
            for round in 0..ROUNDS {
                tier.remove(&keys([round % 16])).unwrap();
                assert!(tier.stats().unwrap().contains_key("rows"));
                assert!(tier.busy_offsets().unwrap().is_empty());
                if round % 20 == 19 {
                    assert!(tier.reset().unwrap());
                }
            }
        });
        let mut ended = 0;
        while ended < 2 * ROUNDS {
            let results = tier.wait(SOON).unwrap();
            assert!(!results.is_empty(), "{ended} jobs ended");
            ended += u64::try_from(results.len()).unwrap();
        }
        ended
    });
    assert_eq!(ended, 2 * ROUNDS);
    tier.drain().unwrap();
    tier.close(SOON).unwrap();
}

#[test]
fn a_tier_on_threads_is_used_from_all_sides() {
    use_from_all_sides("threads");
}

#[test]
fn a_tier_on_the_ring_is_used_from_all_sides() {
    use_from_all_sides("uring");
}
