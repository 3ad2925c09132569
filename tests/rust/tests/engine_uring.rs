//! What is special about the ring: stumbling kernels, one set-up, sleep, limits, order, depth.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use engine_support::{Root, SOON, operation, ring, segment};
use kvstrata_core::buffer::Arena;
use kvstrata_core::io::alter::Alter;
use kvstrata_core::io::uring::{Settings, Uring};
use kvstrata_core::io::{
    Channel, CompletionSink, DataFile, Direction, Engine, Failure, OperationId, Prelude,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;

const READ: Direction = Direction::Read;
const WRITE: Direction = Direction::Write;
const ROW: usize = 16384;

struct Bench {
    engine: Uring,
    completions: Completions,
    file: Arc<DataFile>,
    arena: Arc<Arena>,
    root: Root,
}

fn bench(depth: usize, alter: Option<Alter>) -> Bench {
    let root = Root::disk();
    let completions = Completions::default();
    let settings = Settings {
        depth,
        alter,
        ..Settings::default()
    };
    Bench {
        engine: ring(&root, Direct::Yes, &settings, completions.sink()),
        completions,
        file: root.file("rows", 64 << 20),
        arena: leaked_arena(1000 * ROW, 0).unwrap(),
        root,
    }
}

/// Every third answer is this one, whatever the kernel did.
fn every_third(answer: impl Fn(i32) -> i32 + Send + Sync + 'static) -> Alter {
    let count = AtomicU64::new(0);
    Arc::new(move |_: &_, truth| {
        let is_third = count.fetch_add(1, Ordering::Relaxed) % 3 == 2;
        if is_third { answer(truth) } else { truth }.into()
    })
}

impl Bench {
    /// Writes `count` rows, reads them to other slots and compares.
    fn round_trip(&self, count: usize, odd: usize) {
        let at = |row: usize| u64::try_from(row * ROW).unwrap();
        let move_rows = |first_id: u64, first_slot: usize, direction| {
            let rows = (0..count).map(|row| {
                let pieces = vec![
                    segment(&self.arena, (first_slot + row) * ROW, 4096 + odd),
                    segment(
                        &self.arena,
                        (first_slot + row) * ROW + 4096 + odd,
                        ROW - 4096 - odd,
                    ),
                ];
                let id = first_id + u64::try_from(row).unwrap();
                operation(id, direction, &self.file, at(row), pieces)
            });
            self.engine.submit(rows.collect());
            let done = self.completions.wait(count, SOON);
            assert_eq!(done.len(), count);
            for completion in &done {
                assert_eq!(completion.result, Ok(()), "{:?}", completion.operation.id);
            }
        };
        for row in 0..count {
            assert!(
                self.arena
                    .copy_in(row * ROW, &payload(&row.to_le_bytes(), ROW))
            );
        }
        move_rows(0, 0, WRITE);
        move_rows(1000, 500, READ);
        for row in 0..count {
            let bytes = self.arena.bytes((500 + row) * ROW, ROW).unwrap();
            assert!(bytes == payload(&row.to_le_bytes(), ROW), "row {row}");
        }
    }
}

#[test]
fn what_is_begun_before_a_long_prelude_is_with_the_device_meanwhile() {
    const LONG: usize = 1 << 20;
    let bench = bench(8, None);
    let bytes = payload(b"row", ROW);
    assert!(bench.arena.copy_in(0, &bytes));
    let write = operation(
        1,
        WRITE,
        &bench.file,
        0,
        vec![segment(&bench.arena, 0, ROW)],
    );
    bench.engine.submit(vec![write]);
    assert_eq!(bench.completions.wait(1, SOON)[0].result, Ok(()));
    let read = operation(
        2,
        READ,
        &bench.file,
        0,
        vec![segment(&bench.arena, ROW, ROW)],
    );
    let long = segment(&bench.arena, 4 * ROW, LONG);
    let mut write = operation(3, WRITE, &bench.file, 1 << 20, vec![long]);
    let arena = Arc::clone(&bench.arena);
    let has_come = Arc::new(Mutex::new(false));
    let says = Arc::clone(&has_come);
    write.prelude = Prelude::new(move || {
        let until = SystemClock.now() + SOON;
        let mut landed = vec![0; ROW];
        while landed != bytes && SystemClock.now() < until {
            SystemClock.sleep(Duration::from_millis(1));
            assert!(arena.copy_out(ROW, &mut landed));
        }
        *says.lock().unwrap() = landed == bytes;
    });
    bench.engine.submit(vec![write, read]);
    let mut arrived = 0;
    while arrived < 2 {
        for done in bench.completions.wait(1, 2 * SOON) {
            assert_eq!(done.result, Ok(()));
            arrived += 1;
        }
    }
    assert!(*has_come.lock().unwrap(), "the read waited for the prelude");
}

#[test]
fn transfers_cut_short_anywhere_are_resumed_and_no_byte_is_wrong() {
    for odd in [0, 3] {
        for cut in [512, 4096, 100, 4097] {
            let bench = bench(64, Some(every_third(move |truth| truth.min(cut))));
            bench.round_trip(200, odd);
            assert!(bench.engine.counters().resumed_transfers > 50);
            assert!(bench.engine.shutdown(SOON));
        }
    }
}

#[test]
fn rows_of_any_alignment_survive_many_at_a_time() {
    for odd in [1, 3, 513, 1000] {
        let bench = bench(64, None);
        bench.round_trip(400, odd);
        assert!(bench.engine.counters().bounced_bytes > 0);
        assert!(bench.engine.shutdown(SOON));
    }
}

/// Lets the sink go on only when the test says so: what has been started meanwhile is in order.
#[derive(Default)]
struct Gate(Mutex<(bool, bool)>, Condvar);

impl Gate {
    fn open(&self) {
        self.0.lock().unwrap().0 = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        let mut state = self.0.lock().unwrap();
        state.1 = true;
        self.1.notify_all();
        while !state.0 {
            state = self.1.wait(state).unwrap();
        }
    }

    fn wait_for_somebody(&self) {
        let mut state = self.0.lock().unwrap();
        while !state.1 {
            state = self.1.wait(state).unwrap();
        }
    }
}

#[test]
fn reads_go_first_and_of_eleven_operations_one_is_a_write() {
    let root = Root::disk();
    let completions = Completions::default();
    let file = root.file("rows", 1 << 20);
    let arena = leaked_arena(ROW, 0).unwrap();
    let gate = Arc::new(Gate::default());
    let (held, collect) = (Arc::clone(&gate), completions.sink());
    let sink: CompletionSink = Arc::new(move |completion| {
        held.pass();
        collect(completion);
    });
    // One at a time: the order of completion is the order of start.
    let settings = Settings {
        depth: 1,
        ..Settings::default()
    };
    let engine = ring(&root, Direct::Yes, &settings, sink);
    let one = |id, direction| operation(id, direction, &file, 0, vec![segment(&arena, 0, 4096)]);
    engine.submit(vec![one(0, READ)]);
    gate.wait_for_somebody();
    engine.submit((5000..5050).map(|id| one(id, WRITE)).collect());
    engine.submit((1..1000).map(|id| one(id, READ)).collect());
    gate.open();
    let done = completions.wait(1050, SOON);
    let order: Vec<u64> = done.iter().map(|one| one.operation.id.0).collect();
    let first_write = order.iter().position(|id| *id >= 5000).unwrap();
    for window in order[first_write..first_write + 500].windows(11) {
        let writes = window.iter().filter(|id| **id >= 5000).count();
        assert_eq!(writes, 1, "{window:?}");
    }
    let reads: Vec<u64> = order.into_iter().filter(|id| *id < 5000).collect();
    assert_eq!(
        reads,
        (0..1000).collect::<Vec<u64>>(),
        "reads keep their order"
    );
    assert!(engine.shutdown(SOON));
}

#[test]
fn a_slow_sink_does_not_keep_the_kernel_waiting() {
    const LARGE: usize = 256 << 10;
    let root = Root::disk();
    let completions = Completions::default();
    let file = root.file("rows", 50 << 20);
    let arena = leaked_arena(200 * LARGE, 0).unwrap();
    let collect = completions.sink();
    let calls = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&calls);
    let settings = Settings {
        depth: 4,
        alter: Some(Arc::new(move |_: &_, truth| {
            seen.fetch_add(1, Ordering::Relaxed);
            truth.into()
        })),
        ..Settings::default()
    };
    let sink: CompletionSink = Arc::new(move |completion| {
        SystemClock.sleep(Duration::from_millis(2));
        collect(completion);
    });
    let engine = ring(&root, Direct::Yes, &settings, sink);
    let reads = (0..200_usize).map(|row| {
        let (id, at) = (
            u64::try_from(row).unwrap(),
            u64::try_from(row * LARGE).unwrap(),
        );
        operation(
            id,
            READ,
            &file,
            at,
            vec![segment(&arena, row * LARGE, LARGE)],
        )
    });
    engine.submit(reads.collect());
    let arrived = completions.wait(100, SOON).len();
    let answered = usize::try_from(calls.load(Ordering::Relaxed)).unwrap();
    assert!(
        answered > arrived + 8,
        "{answered} answered, {arrived} delivered"
    );
    assert_eq!(completions.wait(200 - arrived, SOON).len(), 200 - arrived);
    assert!(engine.shutdown(SOON));
}

#[test]
fn a_deadline_ends_what_waits_and_a_shutdown_closes_it() {
    let root = Root::disk();
    let completions = Completions::default();
    let file = root.file("rows", 1 << 20);
    let arena = leaked_arena(ROW, 0).unwrap();
    let gate = Arc::new(Gate::default());
    let (held, collect) = (Arc::clone(&gate), completions.sink());
    let sink: CompletionSink = Arc::new(move |completion| {
        if completion.operation.id == OperationId(1) {
            held.pass();
        }
        collect(completion);
    });
    let settings = Settings::default();
    let engine = ring(&root, Direct::Yes, &settings, sink);
    let one = |id| operation(id, WRITE, &file, 0, vec![segment(&arena, 0, 4096)]);
    // The ring's thread is in the sink: nothing is started, and yet nothing waits for it.
    engine.submit(vec![one(1)]);
    gate.wait_for_somebody();
    assert!(!engine.shutdown(Duration::ZERO));
    engine.submit(vec![one(2), one(3)]);
    let closed = completions.wait(2, SOON);
    assert_eq!(closed.len(), 2);
    assert!(closed.iter().all(|one| one.result == Err(Failure::Closed)));
    let begin = SystemClock.now();
    assert!(!engine.shutdown(Duration::from_millis(100)));
    assert!(SystemClock.now() - begin < Duration::from_secs(3));
    gate.open();
    assert_eq!(completions.wait(1, SOON)[0].result, Ok(()));
    assert!(engine.shutdown(SOON));

    let bench = bench(64, None);
    let mut late = operation(9, READ, &bench.file, 0, vec![segment(&bench.arena, 0, 512)]);
    late.deadline = SystemClock.now();
    bench.engine.submit(vec![late]);
    bench.engine.expire(SystemClock.now());
    assert_eq!(
        bench.completions.wait(1, SOON)[0].result,
        Err(Failure::TimedOut)
    );
    drop(bench.engine);
}

#[test]
fn the_ring_holds_a_lock_until_it_has_drained() {
    let bench = bench(64, None);
    let directory = &bench.root.directory;
    let holder = directory
        .create_new("lock", Access::Write, Direct::No)
        .unwrap();
    assert!(holder.try_lock_exclusive().unwrap());
    bench.engine.guard(&holder);
    // Completed after the ring's thread looked at what to hold.
    bench.round_trip(1, 0);
    drop(holder);
    let other = directory.open("lock", Access::Write, Direct::No).unwrap();
    assert!(!other.try_lock_exclusive().unwrap(), "the ring has it");
    assert!(bench.engine.shutdown(SOON));
    // The kernel takes a ring down in its own time.
    let until = SystemClock.now() + SOON;
    while !other.try_lock_exclusive().unwrap() {
        assert!(SystemClock.now() < until);
        SystemClock.sleep(Duration::from_millis(5));
    }
}

#[test]
fn overdue_operations_are_cancelled_or_complete_but_never_get_lost() {
    let bench = bench(64, Some(every_third(|_| -libc::EINTR)));
    for round in 0..20_u64 {
        let slow = (0..64_u64).map(|number| {
            let slot = usize::try_from(number).unwrap() * ROW;
            let id = round * 64 + number;
            let segments = vec![segment(&bench.arena, slot, ROW)];
            let mut one = operation(id, WRITE, &bench.file, number * 16384, segments);
            one.deadline = SystemClock.now() + Duration::from_millis(1 + round % 2);
            if number % 2 == 0 {
                one.channel = Channel::Table;
            }
            one
        });
        bench.engine.submit(slow.collect());
        for _ in 0..10 {
            bench.engine.expire(SystemClock.now());
            SystemClock.sleep(Duration::from_micros(300));
        }
        let done = bench.completions.wait(64, SOON);
        assert_eq!(done.len(), 64);
        for one in done {
            let allowed = [
                Ok(()),
                Err(Failure::TimedOut),
                Err(Failure::Os(libc::ECANCELED)),
                Err(Failure::Os(libc::EAGAIN)),
            ];
            assert!(allowed.contains(&one.result), "{:?}", one.result);
        }
    }
    assert_eq!(bench.engine.queue().in_flight, 0);
    assert!(bench.engine.shutdown(SOON));
}
