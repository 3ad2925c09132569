//! The order, the deadlines and the failures of the `threads` engine, over an executor that does
//! what the test says.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use engine_support::{Root, SOON, all_of, operation, segment, start};
use kvstrata_core::io::threads::{Bounce, Executed, Executor, ThreadCounts};
use kvstrata_core::io::{
    Alignment, Completion, DataFile, Direction, Engine, EngineCounters, Failure, Operation,
    OperationId,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;

const READ: Direction = Direction::Read;
const WRITE: Direction = Direction::Write;

/// Notes the order of starts; lets operations through once the gate is open.
#[derive(Default)]
struct Gate {
    state: Mutex<(Vec<OperationId>, BTreeSet<u64>)>,
    change: Condvar,
    panics: AtomicBool,
}

impl fmt::Debug for Gate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Gate")
    }
}

impl Gate {
    /// Operations with these numbers hang until they are let go.
    fn hold(&self, ids: impl IntoIterator<Item = u64>) {
        self.state.lock().unwrap().1.extend(ids);
    }

    fn open(&self) {
        self.state.lock().unwrap().1.clear();
        self.change.notify_all();
    }

    fn release(&self, ids: impl IntoIterator<Item = u64>) {
        let mut state = self.state.lock().unwrap();
        for id in ids {
            state.1.remove(&id);
        }
        drop(state);
        self.change.notify_all();
    }

    fn started(&self, count: usize) -> Vec<u64> {
        let mut state = self.state.lock().unwrap();
        while state.0.len() < count {
            let (guard, timeout) = self.change.wait_timeout(state, SOON).unwrap();
            assert!(!timeout.timed_out(), "{count} operations never started");
            state = guard;
        }
        state.0.iter().map(|id| id.0).collect()
    }
}

impl Executor for Gate {
    fn execute(&self, operation: &Operation, _bounce: &mut Bounce) -> Executed {
        assert!(!self.panics.load(Ordering::Relaxed), "as the test wants");
        let mut state = self.state.lock().unwrap();
        state.0.push(operation.id);
        self.change.notify_all();
        while state.1.contains(&operation.id.0) {
            state = self.change.wait(state).unwrap();
        }
        all_of(operation)
    }

    fn requirements(&self) -> Alignment {
        Alignment::NONE
    }

    fn counters(&self) -> EngineCounters {
        EngineCounters::default()
    }
}

struct Bench {
    gate: Arc<Gate>,
    engine: Arc<dyn Engine>,
    completions: Completions,
    file: Arc<DataFile>,
    other: Arc<DataFile>,
    _root: Root,
}

impl Bench {
    fn new(working: usize, replacements_max: usize) -> Self {
        let gate = Arc::new(Gate::default());
        let completions = Completions::default();
        let root = Root::memory();
        let (file, other) = (root.file("rows", 4096), root.file("other", 4096));
        let executor = Arc::clone(&gate);
        let counts = ThreadCounts {
            working,
            replacements_max,
        };
        let engine = start(executor, Arc::new(SystemClock), counts, completions.sink());
        Self {
            gate,
            engine: Arc::new(engine),
            completions,
            file,
            other,
            _root: root,
        }
    }

    /// Submits operations on another file.
    fn submit_elsewhere(&self, ids: impl IntoIterator<Item = u64>, time: Duration) {
        let elsewhere = |id| Operation {
            file: Arc::clone(&self.other),
            ..self.operation(id, READ, time)
        };
        self.engine.submit(ids.into_iter().map(elsewhere).collect());
    }

    fn operation(&self, id: u64, direction: Direction, time: Duration) -> Operation {
        let arena = leaked_arena(8, 0).unwrap();
        let mut operation = operation(id, direction, &self.file, 0, vec![segment(&arena, 0, 8)]);
        operation.deadline = SystemClock.now() + time;
        operation
    }

    fn submit(&self, ids: impl IntoIterator<Item = u64>, direction: Direction, time: Duration) {
        self.engine.submit(
            ids.into_iter()
                .map(|id| self.operation(id, direction, time))
                .collect(),
        );
    }

    fn wait(&self, count: usize) -> Vec<Completion> {
        let arrived = self.completions.wait(count, SOON);
        assert_eq!(arrived.len(), count);
        arrived
    }
}

fn ids(completions: &[Completion]) -> Vec<u64> {
    completions
        .iter()
        .map(|completion| completion.operation.id.0)
        .collect()
}

#[test]
fn a_read_overtakes_ten_thousand_writes_that_wait() {
    let bench = Bench::new(1, 0);
    bench.gate.hold([0]);
    bench.submit(0..10_000, WRITE, SOON);
    bench.gate.started(1);
    bench.submit([20_000], READ, SOON);
    bench.gate.open();
    bench.wait(10_001);
    assert_eq!(bench.gate.started(10_001)[..3], [0, 20_000, 1]);
}

#[test]
fn of_eleven_operations_at_least_one_is_a_write_while_both_wait() {
    let bench = Bench::new(1, 0);
    bench.gate.hold([0]);
    bench.submit([0], READ, SOON);
    bench.gate.started(1);
    bench.submit(1..1000, READ, SOON);
    bench.submit(5000..5050, WRITE, SOON);
    bench.gate.open();
    bench.wait(1050);
    let order = bench.gate.started(1050);
    for window in order[1..550].windows(11) {
        let writes = window.iter().filter(|id| **id >= 5000).count();
        assert_eq!(writes, 1, "{window:?}");
    }
    let reads: Vec<u64> = order.iter().copied().filter(|id| *id < 5000).collect();
    assert_eq!(
        reads,
        (0..1000).collect::<Vec<u64>>(),
        "reads keep their order"
    );
}

#[test]
fn a_deadline_ends_what_was_not_started_and_leaves_what_was() {
    let bench = Bench::new(1, 0);
    bench.gate.hold([1]);
    bench.submit([1, 2], READ, Duration::from_millis(20));
    bench.submit([3], READ, SOON);
    bench.gate.started(1);
    SystemClock.sleep(Duration::from_millis(25));
    bench.engine.expire(SystemClock.now());
    let late = bench.wait(1);
    assert_eq!(
        (ids(&late), late[0].result),
        (vec![2], Err(Failure::TimedOut))
    );
    assert!(bench.engine.is_started(OperationId(1)));
    assert!(!bench.engine.is_started(OperationId(3)));
    let depth = bench.engine.queue();
    assert_eq!(
        (depth.in_flight, depth.stuck, depth.queued_reads),
        (1, 1, 1)
    );
    bench.gate.open();
    let rest = bench.wait(2);
    assert_eq!(ids(&rest), [1, 3]);
    assert!(rest.iter().all(|completion| completion.result.is_ok()));
    assert!(!bench.engine.is_started(OperationId(1)));
}

#[test]
fn stuck_threads_are_replaced_up_to_the_cap_and_go_when_they_return() {
    let bench = Bench::new(2, 2);
    bench.gate.hold(0..4);
    bench.submit(0..4, READ, Duration::from_millis(500));
    bench.gate.started(2);
    SystemClock.sleep(Duration::from_millis(510));
    // Two are stuck, as many as one file may hold; the other two are too late.
    bench.engine.expire(SystemClock.now());
    let late = bench.wait(2);
    assert_eq!(ids(&late), [2, 3]);
    assert!(late.iter().all(|one| one.result == Err(Failure::TimedOut)));
    assert_eq!(bench.engine.counters().replaced_threads, 2);
    // The two replacements and the thread for other files serve the rest.
    bench.gate.hold(10..12);
    bench.submit_elsewhere(10..12, SOON);
    bench.gate.started(4);
    bench.gate.release(10..12);
    bench.submit_elsewhere(12..20, SOON);
    bench.wait(10);

    bench.gate.hold(30..32);
    bench.submit_elsewhere(30..32, Duration::from_millis(500));
    bench.submit_elsewhere([40], Duration::from_millis(500));
    bench.gate.started(14);
    SystemClock.sleep(Duration::from_millis(510));
    bench.engine.expire(SystemClock.now());
    assert_eq!(bench.engine.counters().replaced_threads, 2, "the cap holds");
    let late = bench.wait(1);
    assert_eq!(
        (ids(&late), late[0].result),
        (vec![40], Err(Failure::TimedOut))
    );
    bench.gate.open();
    assert_eq!(bench.wait(4).len(), 4);
    bench.submit(50..60, READ, SOON);
    assert_eq!(bench.wait(10).len(), 10);
    assert!(bench.engine.shutdown(SOON));
}

#[test]
fn a_file_that_hangs_holds_up_no_operation_on_another() {
    let bench = Bench::new(2, 0);
    bench.gate.hold(0..100);
    bench.submit(0..100, READ, SOON);
    bench.gate.started(2);
    // Deadlines are far, and nothing looks at them.
    bench.submit_elsewhere(1000..1100, SOON);
    assert_eq!(ids(&bench.wait(100)), (1000..1100).collect::<Vec<u64>>());
    let depth = bench.engine.queue();
    assert_eq!((depth.in_flight, depth.queued_reads), (2, 98));
    bench.gate.open();
    assert_eq!(bench.wait(100).len(), 100);
    let started: BTreeSet<u64> = bench.gate.started(200).into_iter().collect();
    assert_eq!(started.len(), 200);
}

#[test]
fn a_shutdown_leaves_what_is_stuck_and_closes_what_waits() {
    let bench = Bench::new(1, 0);
    bench.gate.hold([1]);
    bench.submit([1, 2, 3], WRITE, SOON);
    bench.gate.started(1);
    let begin = SystemClock.now();
    assert!(!bench.engine.shutdown(Duration::from_millis(200)));
    let waited = SystemClock.now() - begin;
    assert!(
        waited >= Duration::from_millis(200) && waited < Duration::from_secs(3),
        "{waited:?}"
    );
    let closed = bench.wait(2);
    assert!(
        closed
            .iter()
            .all(|completion| completion.result == Err(Failure::Closed))
    );
    assert!(bench.engine.is_started(OperationId(1)));
    bench.submit([4], WRITE, SOON);
    assert_eq!(bench.wait(1)[0].result, Err(Failure::Closed));
    bench.gate.open();
    assert_eq!(bench.wait(1)[0].result, Ok(()));
    assert!(bench.engine.shutdown(SOON));
    assert!(bench.engine.shutdown(Duration::ZERO));
}

#[test]
fn dropping_the_engine_completes_everything() {
    let bench = Bench::new(1, 0);
    bench.gate.hold([1]);
    bench.submit([1, 2], READ, SOON);
    bench.gate.started(1);
    let Bench {
        gate,
        engine,
        completions,
        ..
    } = bench;
    drop(engine);
    assert_eq!(completions.wait(1, SOON)[0].result, Err(Failure::Closed));
    gate.open();
    assert_eq!(completions.wait(1, SOON)[0].result, Ok(()));
}

#[test]
fn a_panic_fails_its_operation_and_poisons_the_engine() {
    let bench = Bench::new(2, 0);
    assert!(!bench.engine.poisoned());
    bench.gate.panics.store(true, Ordering::Relaxed);
    bench.submit([1], READ, SOON);
    assert_eq!(bench.wait(1)[0].result, Err(Failure::Poisoned));
    assert!(bench.engine.poisoned());
    bench.gate.panics.store(false, Ordering::Relaxed);
    bench.submit(2..10, WRITE, SOON);
    let failed = bench.wait(8);
    assert!(
        failed
            .iter()
            .all(|completion| completion.result == Err(Failure::Poisoned))
    );
    assert!(
        bench.gate.state.lock().unwrap().0.is_empty(),
        "nothing is executed any more"
    );
    assert!(bench.engine.shutdown(SOON));
}

#[test]
fn a_panic_in_the_sink_poisons_the_engine_and_ends_nothing_else() {
    let gate = Arc::new(Gate::default());
    let completions = Completions::default();
    let collect = completions.sink();
    let sink = Arc::new(move |completion: Completion| {
        assert!(
            completion.operation.id != OperationId(1),
            "as the test wants"
        );
        collect(completion);
    });
    let root = Root::memory();
    let file = root.file("rows", 4096);
    let arena = leaked_arena(8, 0).unwrap();
    let counts = ThreadCounts {
        working: 1,
        replacements_max: 0,
    };
    let engine = start(gate, Arc::new(SystemClock), counts, sink);
    let read = |id| operation(id, READ, &file, 0, vec![segment(&arena, 0, 8)]);
    engine.submit(vec![read(1), read(2), read(3)]);
    assert_eq!(completions.wait(2, SOON).len(), 2);
    // Another thread may have been faster than the one that panicked.
    while !engine.poisoned() {
        SystemClock.sleep(Duration::from_millis(1));
    }
    assert!(engine.shutdown(SOON));
}
