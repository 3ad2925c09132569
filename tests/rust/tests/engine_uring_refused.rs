//! A sandbox that closes while a ring is at work. Alone in its process, of which it forbids a call.

mod engine_support;

use std::sync::Arc;

use engine_support::{Root, SOON, operation, ring, segment};
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::uring::{Settings, Uring};
use kvstrata_core::io::{DataFile, Direction, Engine, Failure, QueueDepth};
use kvstrata_core::sys::clock::SystemClock;
use kvstrata_core::sys::fs::{Access, Direct};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use kvstrata_testkit::sandbox::{Reach, deny};

const ROW: usize = 8192;

#[test]
fn when_the_kernel_takes_no_more_calls_threads_take_over_and_no_row_is_lost() {
    let root = Root::disk();
    let file = root.file("rows", 8 << 20);
    let arena = leaked_arena(1000 * ROW, 0).unwrap();
    let completions = Completions::default();
    let found = probe(&root.directory, "uring").unwrap();
    let files = Arc::new(FileCache::new(24));
    let sink = completions.sink();
    let engine = Uring::start(&found, files, Arc::new(SystemClock), sink).unwrap();
    let lonely_completions = Completions::default();
    let settings = Settings::default();
    let lonely = ring(&root, Direct::Yes, &settings, lonely_completions.sink());

    let at = |row: usize| u64::try_from(row * ROW).unwrap();
    let rows = |first: usize, direction, file: &Arc<DataFile>| {
        let row = |row: usize| {
            let segments = vec![segment(&arena, (first + row) * ROW, ROW)];
            let id = u64::try_from(first + row).unwrap();
            operation(id, direction, file, at(row), segments)
        };
        (0..500).map(row).collect::<Vec<_>>()
    };
    for row in 0..500 {
        let bytes = payload(&row.to_string().into_bytes(), ROW);
        assert!(arena.copy_in(row * ROW, &bytes));
    }
    engine.submit(rows(0, Direction::Write, &file));
    assert_eq!(completions.wait(500, SOON).len(), 500);
    assert_eq!(engine.name(), "uring");
    let lock = root
        .directory
        .create_new("lock", Access::Write, Direct::No)
        .unwrap();
    assert!(lock.try_lock_exclusive().unwrap());
    engine.guard(&lock);

    deny(libc::SYS_io_uring_enter, libc::EPERM, Reach::Process).unwrap();
    engine.submit(rows(500, Direction::Read, &file));
    let done = completions.wait(500, SOON);
    assert_eq!(done.len(), 500);
    for one in &done {
        assert_eq!(one.result, Ok(()), "{:?}", one.operation.id);
    }
    for row in 0..500 {
        let bytes = arena.bytes((500 + row) * ROW, ROW).unwrap();
        assert!(
            bytes == payload(&row.to_string().into_bytes(), ROW),
            "{row}"
        );
    }
    assert_eq!(engine.name(), "threads");
    assert!(!engine.poisoned());
    assert_eq!(engine.queue(), QueueDepth::default());
    assert!(engine.shutdown(SOON));

    // Without an heir every operation ends all the same.
    lonely.submit(rows(0, Direction::Read, &file));
    let failed = lonely_completions.wait(500, SOON);
    assert_eq!(failed.len(), 500);
    assert!(
        failed
            .iter()
            .all(|one| one.result == Err(Failure::Poisoned))
    );
    assert!(lonely.poisoned() && lonely.shutdown(SOON));
}
