//! What every engine does, on a disk and in memory, direct and buffered, plain and wrapped.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use engine_support::{Kind, Root, SOON, operation, result, run, segment};
use kvstrata_core::buffer::AlignedBuffer;
use kvstrata_core::io::{
    Channel, CompletionSink, Direction, Engine, Failure, Memory, OperationId, Prelude, Segment,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::{next, payload};
use kvstrata_testkit::{Completions, Fault, FaultyEngine};

const READ: Direction = Direction::Read;
const WRITE: Direction = Direction::Write;

struct Case {
    name: String,
    root: Root,
    engine: Arc<dyn Engine>,
    completions: Completions,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Disk,
    Memory,
}

/// Runs `body` with every engine on every kind of root.
fn with_every_engine(body: impl Fn(&Case)) {
    // On a file system made for the tests, memory would be the same as everywhere.
    let places: &[Place] = match std::env::var_os("KVSTRATA_TEST_FILE_SYSTEM") {
        None => &[Place::Disk, Place::Memory],
        Some(_) => &[Place::Disk],
    };
    for kind in Kind::ALL {
        for place in places.iter().copied() {
            for direct in [Direct::Yes, Direct::No] {
                for wrapped in [false, true] {
                    with_engine(kind, place, direct, wrapped, &body);
                }
            }
        }
    }
}

fn with_engine(kind: Kind, place: Place, direct: Direct, wrapped: bool, body: impl Fn(&Case)) {
    let root = match place {
        Place::Disk => Root::disk(),
        Place::Memory => Root::memory(),
    };
    let completions = Completions::default();
    let engine: Arc<dyn Engine> = if wrapped {
        let faultless = Box::new(|_: &_| Fault::None);
        let build = |sink| Ok::<_, ()>(kind.start(&root, direct, sink));
        Arc::new(FaultyEngine::new(completions.sink(), faultless, build).unwrap())
    } else {
        kind.start(&root, direct, completions.sink())
    };
    body(&Case {
        name: format!("{} {place:?} {direct:?} wrapped: {wrapped}", engine.name()),
        root,
        engine: Arc::clone(&engine),
        completions,
    });
    assert!(engine.shutdown(SOON));
}

impl Case {
    fn result(&self, operation: kvstrata_core::io::Operation) -> Result<(), Failure> {
        result(&*self.engine, &self.completions, operation)
    }
}

#[test]
fn rows_of_any_size_and_alignment_come_back_as_they_were_written() {
    with_every_engine(|case| {
        let pad = AlignedBuffer::zeroed(4096, 4096).unwrap();
        let pad = Memory::Buffer(Arc::new(pad));
        let file = case.root.file("rows", 64 << 20);
        let mut id = 0;
        for (misalignment, slot) in [(0, 0), (0, 4096), (64, 0), (1, 3)] {
            let arena = leaked_arena(8 << 20, misalignment).unwrap();
            for length in [1, 511, 512, 4096, 5000, 65536, 3_098_112, 100_001] {
                let stride = usize::next_multiple_of(length, 4096);
                let segments = || {
                    let padding = Segment {
                        memory: pad.clone(),
                        offset: 0,
                        length: stride - length,
                    };
                    vec![segment(&arena, slot, length), padding]
                };
                let bytes = payload(format!("{misalignment} {slot} {length}").as_bytes(), length);
                assert!(arena.copy_in(slot, &bytes));
                let offset = 8192 + 4096 * id;
                id += 2;
                assert_eq!(
                    case.result(operation(id, WRITE, &file, offset, segments())),
                    Ok(())
                );
                assert!(arena.copy_in(slot, &vec![0xEE; length]));
                let read = operation(id + 1, READ, &file, offset, segments());
                let done = run(&*case.engine, &case.completions, read);
                assert_eq!(done.result, Ok(()), "{}: {length}", case.name);
                assert_eq!(done.transferred_bytes, u64::try_from(stride).unwrap());
                assert_eq!(done.operation.segments.len(), 2);
                assert!(
                    arena.bytes(slot, length).unwrap() == bytes,
                    "{}: {length} bytes at {slot}+{misalignment}",
                    case.name
                );
            }
        }
    });
}

#[test]
fn slots_that_meet_the_requirements_are_not_copied() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 1 << 20);
        let unit = case.engine.requirements().slot_bytes();
        let arena = leaked_arena(1 << 20, 0).unwrap();
        let segments = vec![
            segment(&arena, unit, 8 * unit),
            segment(&arena, 32 * unit, unit),
        ];
        assert_eq!(case.result(operation(1, WRITE, &file, 0, segments)), Ok(()));
        assert_eq!(case.engine.counters().bounced_bytes, 0);
        assert_eq!(case.engine.counters().buffered_operations, 0);
        if unit > 1 {
            let odd = vec![segment(&arena, 1, 8 * unit)];
            assert_eq!(case.result(operation(2, WRITE, &file, 0, odd)), Ok(()));
            let bounced = case.engine.counters().bounced_bytes;
            assert_eq!(bounced, u64::try_from(8 * unit).unwrap());
        }
    });
}

#[test]
fn a_table_entry_of_any_place_and_length_is_read_back() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 65536);
        let arena = leaked_arena(4096, 0).unwrap();
        assert!(arena.copy_in(0, &payload(b"entry", 128)));
        let table = |id, direction, at| {
            let mut entry = operation(
                id,
                direction,
                &file,
                8192 + 128,
                vec![segment(&arena, at, 128)],
            );
            entry.channel = Channel::Table;
            entry
        };
        assert_eq!(case.result(table(1, WRITE, 0)), Ok(()));
        assert_eq!(case.result(table(2, READ, 1000)), Ok(()));
        assert_eq!(arena.bytes(1000, 128), arena.bytes(0, 128));
        assert_eq!(case.engine.counters().buffered_operations, 0);
    });
}

#[test]
fn a_range_beyond_the_end_is_short_and_a_write_there_changes_nothing() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 8192);
        let arena = leaked_arena(65536, 0).unwrap();
        let twice = || vec![segment(&arena, 0, 8192)];
        for (offset, direction) in [(4096, READ), (8192, READ), (1 << 40, READ), (4096, WRITE)] {
            let done = run(
                &*case.engine,
                &case.completions,
                operation(offset, direction, &file, offset, twice()),
            );
            assert_eq!(done.result, Err(Failure::Short), "{} {offset}", case.name);
        }
        let length = case.root.path().join("rows").metadata().unwrap().len();
        assert_eq!(length, 8192);
        assert_eq!(case.result(operation(9, READ, &file, 0, twice())), Ok(()));
        assert_eq!(arena.bytes(0, 8192), Some([0; 8192].as_slice()));
    });
}

#[test]
fn segments_outside_their_memory_and_offsets_beyond_the_numbers_are_refused() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 8192);
        let arena = leaked_arena(4096, 0).unwrap();
        let refused = [
            (0, segment(&arena, 1, 4096)),
            (0, segment(&arena, usize::MAX, 4096)),
            (u64::MAX - 100, segment(&arena, 0, 4096)),
            (1 << 63, segment(&arena, 0, 4096)),
        ];
        for (number, (offset, piece)) in (0..).zip(refused) {
            let result = case.result(operation(number, READ, &file, offset, vec![piece]));
            assert_eq!(
                result,
                Err(Failure::Os(libc::EINVAL)),
                "{} {number}",
                case.name
            );
        }
        assert_eq!(
            case.result(operation(9, READ, &file, 0, Vec::new())),
            Ok(())
        );
    });
}

#[test]
fn a_file_that_lost_its_name_or_never_had_one_is_not_found() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 8192);
        let arena = leaked_arena(4096, 0).unwrap();
        let whole = || vec![segment(&arena, 0, 4096)];
        assert_eq!(case.result(operation(1, WRITE, &file, 0, whole())), Ok(()));
        case.root.directory.unlink("rows").unwrap();
        for direction in [READ, WRITE] {
            let gone = Err(Failure::Os(libc::ENOENT));
            assert_eq!(
                case.result(operation(2, direction, &file, 0, whole())),
                gone
            );
            assert_eq!(
                case.result(operation(3, direction, &file, 0, whole())),
                gone
            );
        }
    });
}

#[test]
fn what_lies_in_the_way_of_a_file_is_an_error_and_never_blocks() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 8192);
        let arena = leaked_arena(4096, 0).unwrap();
        let whole = || vec![segment(&arena, 0, 4096)];
        let other = case.root.file("other", 8192);
        case.root.directory.unlink("rows").unwrap();
        std::os::unix::fs::symlink(
            case.root.path().join("other"),
            case.root.path().join("rows"),
        )
        .unwrap();
        assert!(case.result(operation(1, WRITE, &file, 0, whole())).is_err());
        case.root.directory.unlink("rows").unwrap();
        case.root.directory.create_directory("rows").unwrap();
        assert!(case.result(operation(2, READ, &file, 0, whole())).is_err());
        assert_eq!(case.result(operation(3, READ, &other, 0, whole())), Ok(()));
    });
}

#[test]
fn a_thousand_mixed_operations_complete_once_each_and_none_touches_a_row_of_another() {
    const ROW: usize = 16384;
    const COUNT: u64 = 500;
    with_every_engine(|case| {
        let files = [0, 1, 2].map(|number| case.root.file(&format!("{number}"), 8 << 20));
        let arena = leaked_arena(ROW * 1000, 0).unwrap();
        let place = |row: u64| {
            let file = &files[usize::try_from(row % 3).unwrap()];
            (file, row / 3 * u64::try_from(ROW).unwrap())
        };
        let slot = |row: u64| usize::try_from(row).unwrap() * ROW;
        let mut writes = Vec::new();
        for row in 0..COUNT {
            assert!(arena.copy_in(slot(row), &payload(&row.to_le_bytes(), ROW)));
            let (file, offset) = place(row);
            writes.push(operation(
                row,
                WRITE,
                file,
                offset,
                vec![segment(&arena, slot(row), ROW)],
            ));
        }
        case.engine.submit(writes);
        let written = case.completions.wait(500, SOON);
        assert!(written.iter().all(|completion| completion.result.is_ok()));
        let ids: BTreeSet<OperationId> = written
            .iter()
            .map(|completion| completion.operation.id)
            .collect();
        assert_eq!((written.len(), ids.len()), (500, 500));

        let mut order: Vec<u64> = (0..COUNT).collect();
        let mut state = 7;
        order.sort_by_cached_key(|_| next(&mut state));
        let reads = order.into_iter().map(|row| {
            let (file, offset) = place(row);
            operation(
                1000 + row,
                READ,
                file,
                offset,
                vec![segment(&arena, slot(500 + row), ROW)],
            )
        });
        case.engine.submit(reads.collect());
        let read = case.completions.wait(500, SOON);
        assert_eq!(read.len(), 500);
        for row in 0..COUNT {
            let bytes = arena.bytes(slot(500 + row), ROW).unwrap();
            assert!(
                bytes == payload(&row.to_le_bytes(), ROW),
                "{} row {row}",
                case.name
            );
        }
        assert!(
            case.completions
                .wait(1, Duration::from_millis(5))
                .is_empty()
        );
        assert_eq!(
            case.engine.queue(),
            kvstrata_core::io::QueueDepth::default()
        );
    });
}

#[test]
fn a_sink_may_submit_more() {
    for kind in Kind::ALL {
        let root = Root::disk();
        let completions = Completions::default();
        let file = root.file("rows", 1 << 20);
        let arena = leaked_arena(4096, 0).unwrap();
        let engine: Arc<std::sync::OnceLock<Arc<dyn Engine>>> = Arc::default();
        let (again, collect) = (Arc::clone(&engine), completions.sink());
        let sink: CompletionSink = Arc::new(move |mut completion| {
            if completion.operation.id < OperationId(100) {
                completion.operation.id.0 += 1;
                again.get().unwrap().submit(vec![completion.operation]);
            } else {
                collect(completion);
            }
        });
        engine.set(kind.start(&root, Direct::Yes, sink)).unwrap();
        let engine = engine.get().unwrap();
        let segments = vec![segment(&arena, 0, 4096)];
        engine.submit(vec![operation(1, READ, &file, 0, segments)]);
        let arrived = completions.wait(1, SOON);
        assert_eq!(arrived[0].operation.id, OperationId(100));
        assert!(engine.shutdown(SOON));
    }
}

#[test]
fn a_panic_in_the_sink_poisons_the_engine_and_everything_completes() {
    for kind in Kind::ALL {
        let root = Root::memory();
        let completions = Completions::default();
        let file = root.file("rows", 4096);
        let arena = leaked_arena(8, 0).unwrap();
        let collect = completions.sink();
        let sink: CompletionSink = Arc::new(move |completion| {
            let is_first = completion.operation.id == OperationId(1);
            assert!(!is_first, "as the test wants");
            collect(completion);
        });
        let engine = kind.start(&root, Direct::Yes, sink);
        let read = |id| operation(id, READ, &file, 0, vec![segment(&arena, 0, 8)]);
        engine.submit(vec![read(1), read(2), read(3)]);
        assert_eq!(completions.wait(2, SOON).len(), 2);
        while !engine.poisoned() {
            SystemClock.sleep(Duration::from_millis(1));
        }
        engine.submit(vec![read(4)]);
        assert_eq!(completions.wait(1, SOON)[0].result, Err(Failure::Poisoned));
        assert!(engine.shutdown(SOON));
    }
}

#[test]
fn a_prelude_is_done_once_before_the_first_byte_is_written() {
    const ROW: usize = 12288;
    const ROWS: usize = 300;
    with_every_engine(|case| {
        let file = case.root.file("rows", 8 << 20);
        // Odd, so that rows are copied before they are written where the device wants alignment.
        let arena = leaked_arena(ROW * ROWS + 4096, 1).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let bytes_of = |row: usize| payload(&row.to_le_bytes(), ROW);
        let writes = (0..ROWS).map(|row| {
            let (id, at) = (row.try_into().unwrap(), (row * ROW).try_into().unwrap());
            let mut write = operation(id, WRITE, &file, at, vec![segment(&arena, row * ROW, ROW)]);
            let (arena, done, bytes) = (Arc::clone(&arena), Arc::clone(&done), bytes_of(row));
            write.prelude = Prelude::new(move || {
                assert!(arena.copy_in(row * ROW, &bytes));
                done.fetch_add(1, Ordering::Relaxed);
            });
            write
        });
        case.engine.submit(writes.collect());
        let mut arrived = Vec::new();
        while arrived.len() < ROWS {
            arrived.extend(case.completions.wait(1, SOON));
        }
        assert!(
            arrived.iter().all(|one| one.result == Ok(())),
            "{}",
            case.name
        );
        assert!(
            arrived
                .iter()
                .all(|one| one.operation.started.at().is_some())
        );
        assert_eq!(done.load(Ordering::Relaxed), ROWS, "{}", case.name);
        let back = leaked_arena(ROW, 0).unwrap();
        for row in 0..ROWS {
            let (id, at) = (
                (ROWS + row).try_into().unwrap(),
                (row * ROW).try_into().unwrap(),
            );
            let read = operation(id, READ, &file, at, vec![segment(&back, 0, ROW)]);
            assert_eq!(case.result(read), Ok(()));
            assert!(
                back.bytes(0, ROW).unwrap() == bytes_of(row),
                "{} {row}",
                case.name
            );
        }
    });
}

#[test]
fn a_panic_in_a_prelude_poisons_the_engine_and_everything_completes() {
    for kind in Kind::ALL {
        let root = Root::memory();
        let completions = Completions::default();
        let file = root.file("rows", 4096);
        let arena = leaked_arena(8, 0).unwrap();
        let engine = kind.start(&root, Direct::Yes, completions.sink());
        let mut write = operation(1, WRITE, &file, 0, vec![segment(&arena, 0, 8)]);
        write.prelude = Prelude::new(|| panic!("as the test wants"));
        engine.submit(vec![write]);
        let arrived = completions.wait(1, SOON);
        assert_eq!(arrived[0].result, Err(Failure::Poisoned));
        assert!(engine.poisoned());
        let after = operation(2, READ, &file, 0, vec![segment(&arena, 0, 8)]);
        engine.submit(vec![after]);
        assert_eq!(completions.wait(1, SOON)[0].result, Err(Failure::Poisoned));
        assert!(engine.shutdown(SOON));
    }
}

#[test]
fn an_operation_that_is_too_late_to_start_times_out_and_one_after_the_end_is_closed() {
    with_every_engine(|case| {
        let file = case.root.file("rows", 8192);
        let arena = leaked_arena(4096, 0).unwrap();
        let mut late = operation(1, READ, &file, 0, vec![segment(&arena, 0, 4096)]);
        // A thread of the engine may have read the clock a moment ago.
        late.deadline = SystemClock
            .now()
            .checked_sub(Duration::from_secs(1))
            .unwrap();
        late.prelude = Prelude::new(|| panic!("what is refused is never begun"));
        assert_eq!(case.result(late), Err(Failure::TimedOut));
        assert!(case.engine.shutdown(SOON));
        assert!(
            case.engine.shutdown(Duration::ZERO),
            "a second call does nothing"
        );
        for id in [2, 3] {
            let mut after = operation(id, READ, &file, 0, vec![segment(&arena, 0, 4096)]);
            after.prelude = Prelude::new(|| panic!("what is refused is never begun"));
            assert_eq!(case.result(after), Err(Failure::Closed));
        }
        assert!(!case.engine.poisoned());
    });
}
