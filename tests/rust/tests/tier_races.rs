//! Loads against evictions, removals and stores of the same keys, from many threads at once.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::key::Key;
use kvstrata_testkit::payload::{next, payload};
use tier_support::{Harness, ROW_BYTES, key, keys, options};

/// A tier that many threads use: each has slots of its own, results are for whoever asked.
struct Shared {
    harness: Harness,
    next_job: AtomicU64,
    results: Mutex<HashMap<u64, JobResult>>,
}

impl Shared {
    fn new(harness: Harness) -> Self {
        Self {
            harness,
            next_job: AtomicU64::new(1),
            results: Mutex::default(),
        }
    }

    fn run(&self, load: bool, keys: &[Key], first_slot: usize) -> JobResult {
        let job = self.next_job.fetch_add(1, Ordering::SeqCst);
        let offsets: Vec<u64> = (first_slot..first_slot + keys.len())
            .map(|slot| u64::try_from(slot * ROW_BYTES).unwrap())
            .collect();
        let tier = &self.harness.tier;
        if load {
            tier.load(job, keys, &offsets).unwrap();
        } else {
            tier.store(job, keys, &offsets).unwrap();
        }
        let begun = Instant::now();
        loop {
            if let Some(result) = self.results.lock().unwrap().remove(&job) {
                return result;
            }
            assert!(begun.elapsed() < Duration::from_mins(1), "job {job} hangs");
            let ended = tier.wait(Duration::from_millis(5)).unwrap();
            let ended = ended.into_iter().map(|result| (result.job_id, result));
            self.results.lock().unwrap().extend(ended);
        }
    }

    fn fill(&self, slot: usize, bytes: &[u8]) {
        assert!(self.harness.arena.copy_in(slot * ROW_BYTES, bytes));
    }

    fn slot(&self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; ROW_BYTES];
        assert!(self.harness.arena.copy_out(slot * ROW_BYTES, &mut bytes));
        bytes
    }
}

const READERS: u64 = 8;
const EVICTORS: u64 = 4;

/// How a store may end while rows are pinned and removed.
const STORED: [Outcome; 4] = [
    Outcome::Ok,
    Outcome::Present,
    Outcome::Dropped,
    Outcome::NoSpace,
];

fn readers_against_evictors(time: Duration) {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // About half of the hundred keys fit: every store evicts.
    let slots = usize::try_from((READERS + EVICTORS) * 4).unwrap();
    let harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), slots);
    let shared = Shared::new(harness);
    let (stop, good) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..READERS + EVICTORS {
            let (shared, stop, good) = (&shared, &stop, &good);
            scope.spawn(move || {
                let mut numbers = thread;
                let first_slot = usize::try_from(thread * 4).unwrap();
                while !stop.load(Ordering::SeqCst) {
                    let first = next(&mut numbers) % 97;
                    let own = keys(first..first + 4);
                    if thread < READERS {
                        for slot in 0..4 {
                            shared.fill(first_slot + slot, &[0xEE; ROW_BYTES]);
                        }
                        let result = shared.run(true, &own, first_slot);
                        for (slot, outcome) in result.outcomes.iter().enumerate() {
                            if *outcome == Outcome::Ok {
                                let bytes = payload(own[slot].as_bytes(), ROW_BYTES);
                                let found = shared.slot(first_slot + slot);
                                assert!(found == bytes, "a load brought other bytes");
                                good.fetch_add(1, Ordering::SeqCst);
                            } else {
                                assert_eq!(*outcome, Outcome::Miss);
                            }
                        }
                    } else {
                        if next(&mut numbers).is_multiple_of(4) {
                            shared.harness.tier.remove(&own[..2]).unwrap();
                        }
                        for (slot, key) in own.iter().enumerate() {
                            let bytes = payload(key.as_bytes(), ROW_BYTES);
                            shared.fill(first_slot + slot, &bytes);
                        }
                        let result = shared.run(false, &own, first_slot);
                        let is_allowed = |outcome: &Outcome| STORED.contains(outcome);
                        assert!(result.outcomes.iter().all(is_allowed), "{result:?}");
                    }
                }
            });
        }
        std::thread::sleep(time);
        // On a busy machine little happens in that time.
        for _ in 0..60 {
            let evicted = shared.harness.stat("evicted_rows");
            if evicted > 100 && good.load(Ordering::SeqCst) > 100 {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert!(
        good.load(Ordering::SeqCst) > 100,
        "hardly anything was loaded"
    );
    let harness = shared.harness;
    let evicted = harness.stat("evicted_rows");
    assert!(evicted > 100, "hardly anything was evicted: {evicted}");
    for name in ["corrupt_rows", "torn_rows", "errors"] {
        assert_eq!(harness.stat(name), 0, "{name}");
    }
    harness.assert_quiet();
}

#[test]
fn every_load_is_full_and_correct_or_a_miss_while_others_evict() {
    readers_against_evictors(Duration::from_secs(2));
}

#[test]
#[ignore = "long"]
fn every_load_is_full_and_correct_or_a_miss_while_others_evict_for_half_a_minute() {
    readers_against_evictors(Duration::from_secs(30));
}

/// A row that says which version of its key it is.
fn version_of_row(key: &Key, version: u64) -> Vec<u8> {
    let mut seed = key.as_bytes().to_vec();
    seed.extend(version.to_le_bytes());
    let mut row = version.to_le_bytes().to_vec();
    row.extend(payload(&seed, ROW_BYTES - 8));
    row
}

#[test]
fn a_load_brings_one_whole_version_of_a_row_that_is_removed_and_stored_again_and_again() {
    const VERSIONS: u64 = 1000;
    const LOADERS: usize = 3;
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), LOADERS + 1);
    let shared = Shared::new(harness);
    let own = [key(1, 0)];
    let (stop, seen) = (
        AtomicBool::new(false),
        Mutex::new(HashMap::<u64, u64>::new()),
    );
    std::thread::scope(|scope| {
        for slot in 1..=LOADERS {
            let (shared, stop, seen, own) = (&shared, &stop, &seen, &own);
            scope.spawn(move || {
                let mut newest = 0;
                while !stop.load(Ordering::SeqCst) {
                    shared.fill(slot, &[0xEE; ROW_BYTES]);
                    let result = shared.run(true, own, slot);
                    if result.outcomes == [Outcome::Miss] {
                        continue;
                    }
                    assert_eq!(result.outcomes, [Outcome::Ok]);
                    let row = shared.slot(slot);
                    let version = u64::from_le_bytes(*row.first_chunk().unwrap());
                    assert!(row == version_of_row(&own[0], version), "a mix of rows");
                    assert!(version >= newest, "an older version came back");
                    newest = version;
                    *seen.lock().unwrap().entry(version).or_default() += 1;
                }
            });
        }
        for version in 1..=VERSIONS {
            shared.harness.tier.remove(&own).unwrap();
            shared.fill(0, &version_of_row(&own[0], version));
            let result = shared.run(false, &own, 0);
            assert_eq!(result.outcomes, [Outcome::Ok], "version {version}");
        }
        stop.store(true, Ordering::SeqCst);
    });
    let seen = seen.into_inner().unwrap();
    assert!(
        seen.len() > 20,
        "hardly any version was loaded: {}",
        seen.len()
    );
    assert_eq!(shared.harness.stat("corrupt_rows"), 0);
    shared.harness.assert_quiet();
}
