//! The whole disk tier on the `threads` engine, its files in memory: callers, writer, keeper and
//! engine threads in any order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::io::Engine;
use kvstrata_core::io::threads::{FileExecutor, ThreadCounts, Threads};
use kvstrata_core::job::{JobKind, JobResult, Outcome};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use serde_json::Map;
use shuttle::thread;

use crate::explore;

const ROW: usize = 4096;
const SLOTS: usize = 32;
const LONG: Duration = Duration::from_hours(1);
/// For about eight row files of one row each.
const CAPACITY: u64 = 160 << 10;

thread_local! {
    /// One for all schedules of a test, which follow each other on one thread of the machine.
    static ARENA: Arc<Arena> = leaked_arena(SLOTS * ROW, 0).unwrap();
}

fn key(number: u8) -> Key {
    let mut bytes = [number; 36];
    bytes[32..].fill(0);
    Key::new(&bytes).unwrap()
}

/// A tier whose files are in memory, with two engine threads.
struct Bench {
    tier: Tier,
    arena: Arc<Arena>,
    _root: tempfile::TempDir,
}

impl Bench {
    fn open() -> Arc<Self> {
        let root = kvstrata_testkit::memory::folder().unwrap();
        let options = TierOptions {
            root: root.path().to_path_buf(),
            identity: Map::from_iter([("model".to_owned(), "m".into())]),
            row_bytes: BTreeMap::from([(GroupId(0), u64::try_from(ROW).unwrap())]),
            capacity: Size::Bytes(CAPACITY),
            min_free: Size::Bytes(0),
            policy: "lru".to_owned(),
            directory: None,
            admission: kvstrata_core::eviction::admission::AdmissionOptions::default(),
            io_backend: "threads".to_owned(),
            deadline: Duration::from_secs(30),
            share_mode: "private".to_owned(),
            required: true,
            honours_busy: false,
        };
        let seams = Seams {
            clock: Arc::new(ManualClock::default()),
            start_engine: Arc::new(|found, files, clock, sink| {
                let executor =
                    FileExecutor::new(files, Arc::clone(&clock), found.direct, found.alignment);
                let counts = ThreadCounts {
                    working: 2,
                    replacements_max: 0,
                };
                let engine: Arc<dyn Engine> = Arc::new(Threads::with_executor(
                    Arc::new(executor),
                    clock,
                    counts,
                    sink,
                )?);
                Ok(engine)
            }),
            ..Seams::default()
        };
        let arena = ARENA.with(Arc::clone);
        let tier = Tier::open_shared(options, Arc::clone(&arena), seams).unwrap();
        Arc::new(Self {
            tier,
            arena,
            _root: root,
        })
    }

    fn offsets(first: usize, keys: &[Key]) -> Vec<u64> {
        (first..first + keys.len())
            .map(|slot| u64::try_from(slot * ROW).unwrap())
            .collect()
    }

    /// Asks for a store of slots from `first` on.
    fn store(&self, job: u64, first: usize, keys: &[Key]) {
        for (at, key) in keys.iter().enumerate() {
            let bytes = payload(key.as_bytes(), ROW);
            assert!(self.arena.copy_in((first + at) * ROW, &bytes));
        }
        let asked = self.tier.store(job, keys, &Self::offsets(first, keys));
        asked.unwrap();
    }

    fn load(&self, job: u64, first: usize, keys: &[Key]) {
        let asked = self.tier.load(job, keys, &Self::offsets(first, keys));
        asked.unwrap();
    }

    /// Waits for as many results; those of loads are checked against the slots from `first` on.
    fn results(&self, count: usize) -> BTreeMap<u64, JobResult> {
        let mut all = BTreeMap::new();
        while all.len() < count {
            for result in self.tier.wait(LONG).unwrap() {
                assert!(
                    all.insert(result.job_id, result).is_none(),
                    "a job ended twice"
                );
            }
        }
        all
    }

    /// Every slot that a load calls good holds its key's payload.
    fn check(&self, result: &JobResult, first: usize, keys: &[Key]) {
        assert_eq!(
            (result.kind, result.outcomes.len()),
            (JobKind::Load, keys.len())
        );
        for (at, (outcome, key)) in result.outcomes.iter().zip(keys).enumerate() {
            match outcome {
                Outcome::Ok => {
                    let slot = self.arena.bytes((first + at) * ROW, ROW).unwrap();
                    assert!(slot == payload(key.as_bytes(), ROW), "foreign bytes");
                }
                other => assert_eq!(*other, Outcome::Miss),
            }
        }
    }

    fn number(&self, name: &str) -> u64 {
        self.tier.stats().unwrap()[name].as_u64().unwrap()
    }
}

fn keys(numbers: impl IntoIterator<Item = u8>) -> Vec<Key> {
    numbers.into_iter().map(key).collect()
}

#[test]
fn loads_stores_evictions_and_removals_in_any_order_serve_whole_rows_or_none() {
    explore(|| {
        let bench = Bench::open();
        let first = keys(0..4);
        bench.store(1, 0, &first);
        assert_eq!(bench.results(1)[&1].outcomes, [Outcome::Ok; 4]);
        let asked = [keys([0, 1, 2]), keys([3, 0])];
        let loader = {
            let (bench, asked) = (Arc::clone(&bench), asked.clone());
            thread::spawn(move || {
                bench.load(10, 4, &asked[0]);
                bench.load(11, 8, &asked[1]);
            })
        };
        let storer = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || bench.store(20, 12, &keys(10..16)))
        };
        let remover = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                bench.tier.remove(&keys([1])).unwrap();
                bench.store(30, 20, &keys([1]));
                bench.tier.touch(&keys([2, 3])).unwrap();
            })
        };
        let results = bench.results(4);
        for thread in [loader, storer, remover] {
            thread.join().unwrap();
        }
        bench.check(&results[&10], 4, &asked[0]);
        bench.check(&results[&11], 8, &asked[1]);
        assert!(bench.number("used_bytes") <= CAPACITY);
        assert_eq!(bench.number("corrupt_rows"), 0);
        // What is listed now can be loaded now.
        let all = keys((0..4).chain(10..16));
        let found = bench.tier.lookup(&all).unwrap();
        bench.load(40, 12, &all);
        let last = bench.results(1).remove(&40).unwrap();
        bench.check(&last, 12, &all);
        for (found, outcome) in found.iter().zip(&last.outcomes) {
            assert_eq!(*found, Some(*outcome == Outcome::Ok));
        }
        bench.tier.close(LONG).unwrap();
    });
}

#[test]
fn nothing_asked_before_a_reset_is_found_after_it() {
    explore(|| {
        let bench = Bench::open();
        bench.store(1, 0, &keys(0..2));
        let before = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                bench.load(2, 4, &keys(0..2));
                bench.store(3, 8, &keys(2..4));
            })
        };
        before.join().unwrap();
        let looker = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || bench.tier.lookup(&keys(0..4)).unwrap())
        };
        assert!(bench.tier.reset().unwrap());
        assert_eq!(bench.tier.lookup(&keys(0..4)).unwrap(), [Some(false); 4]);
        bench.store(4, 12, &keys(4..6));
        let results = bench.results(4);
        looker.join().unwrap();
        bench.check(&results[&2], 4, &keys(0..2));
        assert_eq!(results[&4].outcomes, [Outcome::Ok; 2]);
        let found = bench.tier.lookup(&keys(0..6)).unwrap();
        assert_eq!(found[..4], [Some(false); 4]);
        assert_eq!(found[4..], [Some(true); 2]);
        bench.tier.close(LONG).unwrap();
    });
}

#[test]
fn a_close_at_any_moment_ends_every_job_and_every_thread() {
    explore(|| {
        let bench = Bench::open();
        bench.store(1, 0, &keys(0..3));
        let others: Vec<_> = (0..2)
            .map(|number| {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    let (first, keys) = (4 * (1 + usize::from(number)), keys([number, 7]));
                    let offsets = Bench::offsets(first, &keys);
                    // Refused or done: nothing in between, and no panic.
                    let job = 10 + u64::from(number);
                    let asked = bench.tier.load(job, &keys, &offsets);
                    let drained = bench.tier.drain_for(LONG);
                    (asked.is_ok(), drained.is_ok())
                })
            })
            .collect();
        bench.tier.close(LONG).unwrap();
        for other in others {
            other.join().unwrap();
        }
        assert!(bench.tier.poll().is_err());
        bench.tier.close(LONG).unwrap();
    });
}
