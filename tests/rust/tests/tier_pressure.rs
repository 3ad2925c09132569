//! The disk tier with more to store than the disk takes: what waits, in which order, and what is
//! on disk meanwhile.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvstrata_core::format::geometry::Geometry;
use kvstrata_core::io::{Direction, Operation, Prelude, Started};
use kvstrata_core::job::Outcome;
use kvstrata_core::key::GroupId;
use kvstrata_core::tier::Seams;
use kvstrata_testkit::faulty::{Fault, FaultyEngine};
use kvstrata_testkit::payload::next;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, key, keys, options};

const SLOTS: usize = 64;

type Chooser = Arc<Mutex<Box<dyn FnMut(&Operation) -> Fault + Send>>>;
type Handle = Arc<Mutex<Option<Arc<FaultyEngine>>>>;

/// A tier over an engine that asks the test about every operation when it is handed over.
struct Watched {
    harness: Harness,
    engine: Arc<FaultyEngine>,
    choose: Chooser,
    _root: TempDir,
}

impl Watched {
    fn open(capacity: u64) -> Self {
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let choose: Chooser = Arc::new(Mutex::new(Box::new(|_| Fault::None)));
        let (plan, engine) = (Arc::clone(&choose), Handle::default());
        let made = Arc::clone(&engine);
        let seams = Seams {
            start_engine: Arc::new(move |capabilities, files, clock, sink| {
                let plan = Arc::clone(&plan);
                let wrapped = FaultyEngine::new(
                    sink,
                    Box::new(move |operation| (plan.lock().unwrap())(operation)),
                    |sink| (Seams::default().start_engine)(capabilities, files, clock, sink),
                )?;
                let wrapped = Arc::new(wrapped);
                *made.lock().unwrap() = Some(Arc::clone(&wrapped));
                Ok(wrapped)
            }),
            ..Seams::default()
        };
        let own = options(root.path(), ROW_BYTES, capacity);
        let harness = Harness::open_with(own, SLOTS, seams);
        let engine = engine.lock().unwrap().clone().unwrap();
        Self {
            harness,
            engine,
            choose,
            _root: root,
        }
    }

    fn choose(&self, choose: impl FnMut(&Operation) -> Fault + Send + 'static) {
        *self.choose.lock().unwrap() = Box::new(choose);
    }

    /// Begins a store of keys from the slots that start with number `first`.
    fn store_from(&mut self, first: usize, numbers: std::ops::Range<u64>) -> u64 {
        let own = keys(numbers);
        let offsets: Vec<u64> = self.harness.offsets(first + own.len()).split_off(first);
        for (key, offset) in own.iter().zip(&offsets) {
            let bytes = kvstrata_testkit::payload::payload(key.as_bytes(), ROW_BYTES);
            let offset = usize::try_from(*offset).unwrap();
            assert!(self.harness.arena.copy_in(offset, &bytes));
        }
        let job = self.harness.job();
        self.harness.tier.store(job, &own, &offsets).unwrap();
        job
    }

    /// Waits for these jobs; their outcomes in the same order.
    fn outcomes(&self, jobs: &[u64]) -> Vec<Vec<Outcome>> {
        let mut ended = HashMap::new();
        for _ in 0..200 {
            for result in self.harness.tier.wait(Duration::from_millis(500)).unwrap() {
                ended.insert(result.job_id, result.outcomes);
            }
            if jobs.iter().all(|job| ended.contains_key(job)) {
                break;
            }
        }
        jobs.iter().map(|job| ended.remove(job).unwrap()).collect()
    }
}

/// Holds the writer thread where it hands over its first operation, until it is opened.
#[derive(Default)]
struct Barrier(Mutex<(bool, bool)>, Condvar);

impl Barrier {
    fn pass(&self) {
        let mut state = self.0.lock().unwrap();
        state.0 = true;
        self.1.notify_all();
        while !state.1 {
            state = self.1.wait(state).unwrap();
        }
    }

    fn wait_for_writer(&self) {
        let mut state = self.0.lock().unwrap();
        while !state.0 {
            state = self.1.wait(state).unwrap();
        }
    }

    fn open(&self) {
        self.0.lock().unwrap().1 = true;
        self.1.notify_all();
    }
}

fn rows_of(operation: &Operation) -> usize {
    operation.segments.len() / 2
}

#[test]
fn stores_beyond_the_arena_are_dropped_at_once_and_counted_and_later_ones_are_taken_again() {
    let mut watched = Watched::open(16 << 20);
    watched.choose(|_| Fault::Hold);
    let jobs: Vec<u64> = (0..5000)
        .map(|number: u64| {
            let slot = usize::try_from(number).unwrap() % SLOTS;
            watched.store_from(slot, number..number + 1)
        })
        .collect();
    let (taken, dropped) = jobs.split_at(SLOTS);
    for outcomes in watched.outcomes(dropped) {
        assert_eq!(outcomes, [Outcome::Dropped]);
    }
    let counted = |watched: &Watched, outcome: &str| {
        let all = watched.harness.tier.stats().unwrap();
        all["store_outcomes"][outcome].as_u64().unwrap()
    };
    assert_eq!(counted(&watched, "dropped"), 5000 - 64);
    assert_eq!(counted(&watched, "ok"), 0);
    assert_eq!(watched.harness.tier.busy_offsets().unwrap(), [0; 0]);
    watched.choose(|_| Fault::None);
    while !watched
        .harness
        .tier
        .drain_for(Duration::from_millis(10))
        .unwrap()
    {
        watched.engine.release();
    }
    assert_eq!(counted(&watched, "ok"), 64);
    assert_eq!(watched.outcomes(taken), vec![[Outcome::Ok]; SLOTS]);
    let kept = watched.harness.found(&keys(0..5000));
    assert_eq!(kept.iter().filter(|found| **found).count(), SLOTS);
    let job = watched.store_from(0, 9000..9064);
    assert_eq!(watched.outcomes(&[job]), [[Outcome::Ok; SLOTS]]);
}

#[test]
fn a_key_that_two_waiting_jobs_bring_is_written_once() {
    let mut watched = Watched::open(16 << 20);
    let (barrier, written) = (Arc::new(Barrier::default()), Arc::new(Mutex::new(0)));
    let (gate, rows) = (Arc::clone(&barrier), Arc::clone(&written));
    watched.choose(move |operation| {
        *rows.lock().unwrap() += rows_of(operation);
        gate.pass();
        Fault::None
    });
    let first = watched.store_from(0, 0..1);
    barrier.wait_for_writer();
    let jobs = [
        watched.store_from(1, 10..20),
        watched.store_from(11, 15..25),
        watched.store_from(21, 24..26),
    ];
    barrier.open();
    let outcomes = watched.outcomes(&[first, jobs[0], jobs[1], jobs[2]]);
    let (ok, present) = (Outcome::Ok, Outcome::Present);
    assert_eq!(outcomes[0], [ok]);
    assert_eq!(outcomes[1], [ok; 10]);
    assert_eq!(outcomes[2], [[present; 5], [ok; 5]].concat());
    assert_eq!(outcomes[3], [present, ok]);
    assert_eq!(*written.lock().unwrap(), 1 + 16);
    let own = keys(10..26);
    assert_eq!(watched.harness.load(&own), [ok; 16]);
}

#[test]
fn jobs_of_single_rows_that_wait_are_stored_as_neighbours() {
    let mut watched = Watched::open(16 << 20);
    let barrier = Arc::new(Barrier::default());
    let gate = Arc::clone(&barrier);
    watched.choose(move |_| {
        gate.pass();
        Fault::None
    });
    let mut jobs = vec![watched.store_from(0, 0..1)];
    barrier.wait_for_writer();
    jobs.extend(
        (1..24)
            .zip(1..)
            .map(|(slot, number)| watched.store_from(slot, number..number + 1)),
    );
    barrier.open();
    assert_eq!(watched.outcomes(&jobs), vec![[Outcome::Ok]; 24]);
    let reads = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&reads);
    watched.choose(move |operation| {
        seen.lock().unwrap().push(rows_of(operation));
        Fault::None
    });
    let own = keys(0..24);
    assert_eq!(watched.harness.load(&own), [Outcome::Ok; 24]);
    assert_eq!(*reads.lock().unwrap(), [24]);
}

#[test]
fn a_later_job_takes_the_place_of_an_earlier_one_planned_with_it() {
    // Room for 47 rows: the second of the jobs that wait must evict rows of older jobs.
    let mut watched = Watched::open(1 << 20);
    let room = {
        let all = watched.store_from(0, 1000..1064);
        let outcomes = watched.outcomes(&[all]).remove(0);
        outcomes
            .iter()
            .filter(|outcome| **outcome == Outcome::Ok)
            .count()
    };
    assert!((40..52).contains(&room), "{room}");
    let barrier = Arc::new(Barrier::default());
    let gate = Arc::clone(&barrier);
    watched.choose(move |_| {
        gate.pass();
        Fault::None
    });
    let first = watched.store_from(0, 0..1);
    barrier.wait_for_writer();
    let jobs = [
        watched.store_from(1, 10..30),
        watched.store_from(21, 30..50),
    ];
    barrier.open();
    let outcomes = watched.outcomes(&[first, jobs[0], jobs[1]]);
    assert_eq!(outcomes[0], [Outcome::Ok]);
    assert_eq!(outcomes[1], [Outcome::Ok; 20]);
    assert_eq!(outcomes[2], [Outcome::Ok; 20]);
    let own = keys(10..50);
    assert_eq!(watched.harness.load(&own), [Outcome::Ok; 40]);
}

/// The entries on disk of the rows that an operation is about, in its file.
fn entries(operation: &Operation) -> Vec<Vec<u8>> {
    let path = operation.file.directory().path_of(operation.file.name());
    let file = std::fs::File::open(path).unwrap();
    let row_bytes = u64::try_from(ROW_BYTES).unwrap();
    let length = file.metadata().unwrap().len();
    let geometry = Geometry::for_budget(GroupId(0), row_bytes, length).unwrap();
    assert_eq!(geometry.file_bytes(), length);
    let first = (operation.offset - geometry.rows_offset()) / geometry.row_stride_bytes();
    (0..u64::try_from(rows_of(operation)).unwrap())
        .map(|more| {
            let row = u32::try_from(first + more).unwrap();
            let mut entry = vec![0; 128];
            file.read_exact_at(&mut entry, geometry.entry_offset(row))
                .unwrap();
            entry
        })
        .collect()
}

#[test]
fn a_row_is_handed_over_only_when_its_entry_is_cleared_and_entered_only_when_it_is_written() {
    let mut watched = Watched::open(1 << 20);
    let written = Arc::new(Mutex::new((0, 0)));
    let seen = Arc::clone(&written);
    watched.choose(move |operation| {
        if operation.direction == Direction::Write {
            let mut seen = seen.lock().unwrap();
            for entry in entries(operation) {
                seen.0 += 1;
                seen.1 += usize::from(entry != [0; 128]);
            }
        }
        Fault::None
    });
    let mut random = 1;
    for round in 0..60 {
        let job = watched.store_from(0, round * 20..round * 20 + 20);
        assert_eq!(watched.outcomes(&[job]), [[Outcome::Ok; 20]]);
        let mut old = keys(0..round * 20);
        old.sort_by_cached_key(|_| next(&mut random));
        watched.harness.tier.touch(&old).unwrap();
    }
    assert_eq!(*written.lock().unwrap(), (1200, 0));

    // Written by the device, and not yet reported: no entry, however long that takes.
    let held = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&held);
    watched.choose(move |operation| {
        let again = Operation {
            started: Started::default(),
            prelude: Prelude::NONE,
            id: operation.id,
            direction: operation.direction,
            file: Arc::clone(&operation.file),
            channel: operation.channel,
            offset: operation.offset,
            segments: operation.segments.clone(),
            deadline: operation.deadline,
        };
        kept.lock().unwrap().push(again);
        Fault::Hold
    });
    let job = watched.store_from(0, 5000..5008);
    let count = || held.lock().unwrap().iter().map(rows_of).sum::<usize>();
    while count() < 8 || watched.engine.held() < held.lock().unwrap().len() {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(30));
    let all = |held: &[Operation]| held.iter().flat_map(entries).collect::<Vec<_>>();
    assert_eq!(all(&held.lock().unwrap()), vec![vec![0; 128]; 8]);
    assert_eq!(watched.harness.found(&[key(5000, 0)]), [false]);
    watched.engine.release();
    assert_eq!(watched.outcomes(&[job]), [[Outcome::Ok; 8]]);
    let entered = all(&held.lock().unwrap());
    assert!(entered.iter().all(|entry| *entry != [0; 128]));
}
