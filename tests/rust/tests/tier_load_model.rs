//! Loads, stores, removals, resets and deadlines in random order against a model, over an engine
//! whose reads return one at a time, when the test says so.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvstrata_core::io::probe::probe;
use kvstrata_core::io::threads::{Bounce, Executor, FileExecutor};
use kvstrata_core::io::{
    Alignment, Completion, CompletionSink, Direction, Engine, EngineCounters, Failure, Operation,
    OperationId, QueueDepth,
};
use kvstrata_core::job::{JobResult, Outcome};
use kvstrata_core::tier::{CircuitLimits, Seams};
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::payload::{next, payload};
use tier_support::faulty::Mount;
use tier_support::{Harness, ROW_BYTES, key, options};

const STRIDE: usize = 8192;
const KEYS: u64 = 10;
/// Slots that are loaded to; a few more are stored from.
const SLOTS: usize = 24;
const CANARY: u8 = 0xC3;
const DEADLINE: Duration = Duration::from_millis(50);

/// Does writes at once, and a read when the test steps it.
struct Stepped {
    executor: FileExecutor,
    sink: CompletionSink,
    held: Mutex<Vec<Operation>>,
}

impl std::fmt::Debug for Stepped {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Stepped")
    }
}

/// How a read ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Good,
    Spoilt,
    Failed,
}

impl Stepped {
    fn execute(&self, mut operation: Operation, end: End) {
        operation.begin(Instant::now());
        let executed = self.executor.execute(&operation, &mut Bounce::default());
        assert_eq!(executed.result, Ok(()));
        let (result, transferred_bytes) = match end {
            End::Failed => (Err(Failure::Os(libc::EINVAL)), 0),
            End::Good | End::Spoilt => (Ok(()), executed.transferred_bytes),
        };
        if end == End::Spoilt {
            for (segment, offset) in places_of_rows(&operation) {
                let memory = &operation.segments[segment].memory;
                assert!(memory.copy_in(offset + 100, b"spoilt"));
            }
        }
        (self.sink)(Completion {
            operation,
            result,
            transferred_bytes,
        });
    }

    fn count(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// The rows of a held read, by the numbers in their first bytes.
    fn peek(&self, at: usize) -> Vec<u64> {
        let held = self.held.lock().unwrap();
        let operation = &held[at];
        // A read of the test's own, to memory of its own: what the tier sees is not touched.
        let bytes = usize::try_from(operation.bytes()).unwrap();
        let memory = kvstrata_core::buffer::AlignedBuffer::zeroed(bytes, 4096).unwrap();
        let memory = kvstrata_core::buffer::Memory::Buffer(Arc::new(memory));
        let own = Operation {
            id: operation.id,
            direction: Direction::Read,
            file: Arc::clone(&operation.file),
            channel: operation.channel,
            offset: operation.offset,
            segments: vec![kvstrata_core::io::Segment {
                memory: memory.clone(),
                offset: 0,
                length: bytes,
            }],
            deadline: operation.deadline,
            started: kvstrata_core::io::Started::default(),
            prelude: kvstrata_core::io::Prelude::NONE,
        };
        drop(held);
        let executed = self.executor.execute(&own, &mut Bounce::default());
        assert_eq!(executed.result, Ok(()));
        let number = |at| {
            let mut number = [0; 8];
            assert!(memory.copy_out(at, &mut number));
            u64::from_le_bytes(number)
        };
        (0..bytes).step_by(STRIDE).map(number).collect()
    }

    fn step(&self, at: usize, end: End) {
        let operation = self.held.lock().unwrap().remove(at);
        self.execute(operation, end);
    }
}

/// Segment and offset in its memory of each row of a read: in slots, each followed by padding, or
/// side by side in one buffer.
fn places_of_rows(operation: &Operation) -> Vec<(usize, usize)> {
    if let [segment] = operation.segments.as_slice() {
        let offsets = (0..segment.length).step_by(STRIDE);
        return offsets.map(|offset| (0, segment.offset + offset)).collect();
    }
    let rows = operation.segments.iter().enumerate().step_by(2);
    rows.map(|(at, segment)| (at, segment.offset)).collect()
}

impl Engine for Stepped {
    fn name(&self) -> &'static str {
        "stepped"
    }

    fn submit(&self, operations: Vec<Operation>) {
        for operation in operations {
            match operation.direction {
                Direction::Read => self.held.lock().unwrap().push(operation),
                Direction::Write => self.execute(operation, End::Good),
            }
        }
    }

    fn expire(&self, _now: Instant) {}

    fn is_started(&self, operation: OperationId) -> bool {
        let held = self.held.lock().unwrap();
        held.iter().any(|one| one.id == operation)
    }

    fn queue(&self) -> QueueDepth {
        QueueDepth {
            in_flight: self.count(),
            ..QueueDepth::default()
        }
    }

    fn counters(&self) -> EngineCounters {
        self.executor.counters()
    }

    fn requirements(&self) -> Alignment {
        self.executor.requirements()
    }

    fn poisoned(&self) -> bool {
        false
    }

    fn shutdown(&self, _timeout: Duration) -> bool {
        self.count() == 0
    }
}

/// What should become of a key of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Open,
    Ended(Outcome),
}

#[derive(Debug)]
struct Job {
    slots: Vec<usize>,
    /// Key and row that were asked for; no row where there was none.
    rows: Vec<(u64, Option<u64>)>,
    expected: Vec<Expected>,
    busy: Vec<usize>,
}

/// A read of a row that somebody still waits for.
#[derive(Debug)]
struct Reading {
    leader: (u64, usize),
    followers: Vec<(u64, usize)>,
    epoch: u64,
}

#[derive(Debug, Default)]
struct Model {
    /// The row of each key that is found.
    listed: BTreeMap<u64, u64>,
    key_of_row: BTreeMap<u64, u64>,
    reading: BTreeMap<u64, Reading>,
    jobs: BTreeMap<u64, Job>,
    /// Slots that a read that was given up may still write, by its row.
    busy: BTreeMap<u64, usize>,
    epoch: u64,
    next_row: u64,
    coalesced: u64,
    led: u64,
    timeouts: u64,
}

impl Model {
    fn end(&mut self, (job, position): (u64, usize), outcome: Outcome) {
        let expected = &mut self.jobs.get_mut(&job).unwrap().expected[position];
        assert_eq!(*expected, Expected::Open, "job {job} at {position}");
        *expected = Expected::Ended(outcome);
        self.timeouts += u64::from(outcome == Outcome::Timeout);
    }

    fn unlist(&mut self, row: u64) {
        let key = self.key_of_row[&row];
        if self.listed.get(&key) == Some(&row) {
            self.listed.remove(&key);
        }
    }

    /// A read of these rows has ended so.
    fn returned(&mut self, rows: &[u64], end: End) {
        if end == End::Failed && rows.len() > 1 && self.reading.contains_key(&rows[0]) {
            return; // Each is read again alone.
        }
        for row in rows {
            self.busy.remove(row);
            let Some(reading) = self.reading.remove(row) else {
                continue; // Given up before.
            };
            let current = reading.epoch == self.epoch;
            let (leader, follower) = match end {
                End::Good if current => (Outcome::Ok, Outcome::Ok),
                End::Spoilt if current => (Outcome::Corrupt, Outcome::Miss),
                End::Failed if current => (Outcome::IoError, Outcome::Miss),
                _ => (Outcome::Miss, Outcome::Miss),
            };
            if end != End::Good {
                self.unlist(*row);
            }
            self.end(reading.leader, leader);
            for one in reading.followers {
                self.end(one, follower);
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The kernel has the slots until it returns them.
    Slots,
    /// The same, but a load may end before.
    BusySlots,
    /// The kernel has buffers.
    Buffers,
}

struct Run {
    kind: Kind,
    harness: Harness,
    engine: Arc<Stepped>,
    clock: Arc<ManualClock>,
    model: Model,
    choices: u64,
    _root: tempfile::TempDir,
}

fn row_bytes_of(key_number: u64, row: u64) -> Vec<u8> {
    let mut seed = key(key_number, 0).as_bytes().to_vec();
    seed.extend(row.to_le_bytes());
    let mut bytes = row.to_le_bytes().to_vec();
    bytes.extend(payload(&seed, ROW_BYTES - 8));
    bytes
}

impl Run {
    fn new(kind: Kind, seed: u64) -> Self {
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut own = options(root.path(), ROW_BYTES, 16 << 20);
        own.deadline = DEADLINE;
        own.honours_busy = kind == Kind::BusySlots;
        let clock = Arc::new(ManualClock::default());
        let made: Arc<Mutex<Option<Arc<Stepped>>>> = Arc::default();
        let engine = Arc::clone(&made);
        let mount = match kind {
            Kind::Buffers => Mount::MayHang,
            Kind::Slots | Kind::BusySlots => Mount::Local,
        };
        let seams = Seams {
            clock: Arc::<ManualClock>::clone(&clock),
            probe_root: Arc::new(move |root, backend| {
                let mut found = probe(root, backend)?;
                found.may_hang = mount == Mount::MayHang;
                Ok(found)
            }),
            start_engine: Arc::new(move |found, files, clock, sink| {
                let executor = FileExecutor::new(files, clock, found.direct, found.alignment);
                let stepped = Arc::new(Stepped {
                    executor,
                    sink,
                    held: Mutex::default(),
                });
                *made.lock().unwrap() = Some(Arc::clone(&stepped));
                Ok(stepped)
            }),
            circuit: CircuitLimits {
                // What fails here fails on purpose, and the device is not given up for it.
                failures_max: u32::MAX,
                ..CircuitLimits::default()
            },
        };
        let harness = Harness::open_with(own, SLOTS + 4, seams);
        let engine = engine.lock().unwrap().clone().unwrap();
        let run = Self {
            kind,
            harness,
            engine,
            clock,
            model: Model::default(),
            choices: seed,
            _root: root,
        };
        (0..SLOTS).for_each(|slot| run.mark(slot));
        run
    }

    fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap();
        usize::try_from(next(&mut self.choices) % bound).unwrap()
    }

    /// Marks a slot as nobody's.
    fn mark(&self, slot: usize) {
        let canary = [CANARY; ROW_BYTES];
        assert!(self.harness.arena.copy_in(slot * ROW_BYTES, &canary));
    }

    fn slot(&self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; ROW_BYTES];
        let at = slot * ROW_BYTES;
        assert!(self.harness.arena.copy_out(at, &mut bytes));
        bytes
    }

    fn free_slots(&self) -> Vec<usize> {
        let jobs = self.model.jobs.values().flat_map(|job| &job.slots);
        let taken: Vec<usize> = jobs.chain(self.model.busy.values()).copied().collect();
        (0..SLOTS).filter(|slot| !taken.contains(slot)).collect()
    }

    fn store(&mut self) {
        let count = 1 + self.below(3);
        let mut numbers: Vec<u64> = (0..KEYS)
            .filter(|number| !self.model.listed.contains_key(number))
            .collect();
        numbers.truncate(count);
        for (at, number) in numbers.iter().enumerate() {
            let row = self.model.next_row;
            self.model.next_row += 1;
            let bytes = row_bytes_of(*number, row);
            let offset = (SLOTS + at) * ROW_BYTES;
            assert!(self.harness.arena.copy_in(offset, &bytes));
            self.model.listed.insert(*number, row);
            self.model.key_of_row.insert(row, *number);
        }
        let job = self.harness.job();
        let keys: Vec<_> = numbers.iter().map(|number| key(*number, 0)).collect();
        let offsets: Vec<u64> = (0..keys.len())
            .map(|at| u64::try_from((SLOTS + at) * ROW_BYTES).unwrap())
            .collect();
        self.harness.tier.store(job, &keys, &offsets).unwrap();
        let mut ended = false;
        while !ended {
            for result in self.harness.tier.wait(Duration::from_secs(1)).unwrap() {
                if result.job_id == job {
                    assert_eq!(result.outcomes, vec![Outcome::Ok; keys.len()]);
                    ended = true;
                } else {
                    self.check_result(&result);
                }
            }
        }
    }

    fn load(&mut self) {
        let mut free = self.free_slots();
        let count = (1 + self.below(4)).min(free.len());
        let first = next(&mut self.choices) % KEYS;
        let numbers: Vec<u64> = (first..).take(count).map(|at| at % KEYS).collect();
        let mut slots = Vec::new();
        for _ in &numbers {
            let at = self.below(free.len());
            slots.push(free.swap_remove(at));
        }
        let keys: Vec<_> = numbers.iter().map(|number| key(*number, 0)).collect();
        let id = self.harness.begin_load_at(&keys, &slots);
        let model = &mut self.model;
        let mut job = Job {
            slots,
            rows: Vec::new(),
            expected: Vec::new(),
            busy: Vec::new(),
        };
        for (position, number) in numbers.iter().enumerate() {
            let row = model.listed.get(number).copied();
            job.rows.push((*number, row));
            let Some(row) = row else {
                job.expected.push(Expected::Ended(Outcome::Miss));
                continue;
            };
            job.expected.push(Expected::Open);
            if let Some(reading) = model.reading.get_mut(&row) {
                reading.followers.push((id, position));
                model.coalesced += 1;
            } else {
                let reading = Reading {
                    leader: (id, position),
                    followers: Vec::new(),
                    epoch: model.epoch,
                };
                model.reading.insert(row, reading);
                model.led += 1;
            }
        }
        model.jobs.insert(id, job);
    }

    fn step(&mut self) {
        if self.engine.count() == 0 {
            return;
        }
        let at = self.below(self.engine.count());
        let end = match self.below(8) {
            0 => End::Spoilt,
            1 => End::Failed,
            _ => End::Good,
        };
        let rows = self.engine.peek(at);
        // Slots of reads that were given up are nobody's once they are back.
        let back: Vec<usize> = rows
            .iter()
            .filter_map(|row| self.model.busy.get(row).copied())
            .collect();
        self.engine.step(at, end);
        self.model.returned(&rows, end);
        for slot in back {
            self.mark(slot);
        }
    }

    fn remove(&mut self) {
        let number = next(&mut self.choices) % KEYS;
        self.harness.tier.remove(&[key(number, 0)]).unwrap();
        self.model.listed.remove(&number);
    }

    fn reset(&mut self) {
        assert!(self.harness.tier.reset().unwrap());
        self.model.listed.clear();
        self.model.epoch += 1;
    }

    /// Lets the deadline of all jobs pass.
    fn be_late(&mut self) {
        // What was given up before comes back first: too many such reads close the tier.
        while (0..self.engine.count()).any(|at| self.was_given_up(at)) {
            self.step();
        }
        self.settle_results();
        self.clock.advance(DEADLINE * 2);
        let gives_up = self.kind != Kind::Slots;
        let model = &mut self.model;
        let rows: Vec<u64> = model.reading.keys().copied().collect();
        for row in rows {
            let reading = model.reading.get_mut(&row).unwrap();
            let leader = reading.leader;
            let followers = std::mem::take(&mut reading.followers);
            let outcome = if gives_up {
                Outcome::Miss
            } else {
                Outcome::Timeout
            };
            if gives_up || !followers.is_empty() {
                model.unlist(row);
            }
            for one in followers {
                model.end(one, outcome);
            }
            if gives_up {
                model.reading.remove(&row);
                model.end(leader, Outcome::Timeout);
            }
            if self.kind == Kind::BusySlots {
                let job = model.jobs.get_mut(&leader.0).unwrap();
                job.busy.push(leader.1);
                model.busy.insert(row, job.slots[leader.1]);
            }
        }
        let until = Instant::now() + Duration::from_secs(20);
        // The keeper comes by within one deadline of the machine's clock.
        while self.timeouts() < self.model.timeouts {
            assert!(Instant::now() < until, "jobs are late: {:?}", self.model);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn timeouts(&self) -> u64 {
        let stats = self.harness.tier.stats().unwrap();
        stats["load_outcomes"]["timeout"].as_u64().unwrap()
    }

    fn was_given_up(&self, at: usize) -> bool {
        let rows = self.engine.peek(at);
        rows.iter().any(|row| !self.model.reading.contains_key(row))
    }

    fn check_result(&mut self, result: &JobResult) {
        let job = self.model.jobs.remove(&result.job_id).unwrap();
        let mut busy = job.busy.clone();
        busy.sort_unstable();
        assert_eq!(result.busy, busy, "{job:?}");
        for (position, outcome) in result.outcomes.iter().enumerate() {
            let expected = job.expected[position];
            assert_eq!(
                Expected::Ended(*outcome),
                expected,
                "at {position} of {job:?}"
            );
            let slot = job.slots[position];
            if *outcome == Outcome::Ok {
                let (number, row) = job.rows[position];
                let bytes = row_bytes_of(number, row.unwrap());
                assert!(
                    self.slot(slot) == bytes,
                    "other bytes at {position} of {job:?}"
                );
            }
            if !busy.contains(&position) {
                self.mark(slot);
            }
        }
    }

    /// Takes every result that is there: no more and no fewer than the model expects.
    fn settle_results(&mut self) {
        for result in self.harness.tier.poll().unwrap() {
            self.check_result(&result);
        }
        let open = |job: &Job| job.expected.contains(&Expected::Open);
        let missing = self.model.jobs.values().find(|job| !open(job));
        assert!(missing.is_none(), "it should have ended: {missing:?}");
    }

    fn check(&mut self) {
        self.settle_results();
        for slot in self.free_slots() {
            let untouched = self.slot(slot).iter().all(|byte| *byte == CANARY);
            assert!(untouched, "slot {slot} was written while it was nobody's");
        }
        let all: Vec<_> = (0..KEYS).map(|number| key(number, 0)).collect();
        let listed: Vec<bool> = (0..KEYS)
            .map(|number| self.model.listed.contains_key(&number))
            .collect();
        assert_eq!(self.harness.found(&all), listed);
        let mut busy: Vec<u64> = self
            .model
            .busy
            .values()
            .map(|slot| u64::try_from(slot * ROW_BYTES).unwrap())
            .collect();
        busy.sort_unstable();
        assert_eq!(self.harness.tier.busy_offsets().unwrap(), busy);
        let reading = u64::try_from(self.model.reading.len()).unwrap();
        assert_eq!(self.harness.stat("rows_being_read"), reading);
        assert_eq!(self.harness.stat("coalesced_loads"), self.model.coalesced);
        assert_eq!(self.timeouts(), self.model.timeouts);
    }

    fn go(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.below(100) {
                0..20 => self.store(),
                20..60 if !self.free_slots().is_empty() => self.load(),
                90..96 => self.remove(),
                96..97 => self.reset(),
                97..98 => self.be_late(),
                _ => self.step(),
            }
            while self.engine.count() > 12 {
                self.step();
            }
            self.check();
        }
        while self.engine.count() > 0 {
            self.step();
        }
        self.check();
        assert!(self.model.jobs.is_empty());
        self.harness.assert_quiet();
        assert!(self.model.coalesced > 10 && self.model.led > 10);
        self.harness.tier.close(Duration::from_secs(10)).unwrap();
    }
}

fn runs(kind: Kind) {
    let seeds: Vec<u64> = match std::env::var("KVSTRATA_TEST_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..4).collect(),
    };
    for seed in seeds {
        let run = std::panic::AssertUnwindSafe(|| Run::new(kind, seed).go(250));
        if let Err(panic) = std::panic::catch_unwind(run) {
            #[expect(clippy::print_stdout, reason = "how to run it again")]
            {
                println!("KVSTRATA_TEST_SEED={seed}");
            }
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn loads_to_slots_do_what_the_model_says() {
    runs(Kind::Slots);
}

#[test]
fn loads_to_slots_that_may_stay_busy_do_what_the_model_says() {
    runs(Kind::BusySlots);
}

#[test]
fn loads_through_buffers_do_what_the_model_says() {
    runs(Kind::Buffers);
}
