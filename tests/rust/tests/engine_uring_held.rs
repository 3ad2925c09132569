//! Reads that a stopped FUSE daemon holds back. Needs `bindfs`; says so where it is missing.

mod engine_support;

use std::sync::Arc;
use std::time::Duration;

use engine_support::mount::{Mount, drop_cache};
use engine_support::{SOON, operation, segment};
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::uring::Uring;
use kvstrata_core::io::{DataFile, Direction, Engine, Failure, OperationId};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use rustix::process::Signal;

const ROW: usize = 65536;

#[test]
fn a_read_held_by_a_dead_mount_keeps_its_slot_until_the_kernel_has_returned_it() {
    let Some(mount) = Mount::new() else {
        return;
    };
    let directory = Directory::open_root(&mount.path(), false, ShareMode::Private).unwrap();
    let directory = Arc::new(directory);
    let found = probe(&directory, "uring").unwrap();
    assert_eq!((found.io_backend, found.may_hang), ("uring", true));
    assert_eq!(probe(&directory, "auto").unwrap().io_backend, "threads");
    let made = directory
        .create_new("rows", Access::Write, Direct::No)
        .unwrap();
    made.set_length(64 << 20).unwrap();
    drop(made);
    let file = DataFile::new(Arc::clone(&directory), "rows", Access::Write);

    let completions = Completions::default();
    let files = Arc::new(FileCache::new(24));
    let sink = completions.sink();
    let engine = Uring::start(&found, files, Arc::new(SystemClock), sink).unwrap();
    let arena = leaked_arena(8 * ROW, 0).unwrap();
    let read = |id: u64| {
        let slot = usize::try_from(id).unwrap() * ROW;
        let segments = vec![segment(&arena, slot, ROW)];
        let mut read = operation(id, Direction::Read, &file, id * (1 << 20), segments);
        read.deadline = SystemClock.now() + Duration::from_millis(200);
        read
    };
    engine.submit(vec![read(0)]);
    assert_eq!(completions.wait(1, SOON).remove(0).result, Ok(()));
    drop_cache(&mount.path());

    mount.signal(Signal::STOP);
    engine.submit((1..5).map(read).collect());
    SystemClock.sleep(Duration::from_millis(300));
    engine.expire(SystemClock.now());
    let early = completions.wait(4, Duration::from_millis(300));
    let held = 4 - early.len();
    assert!(held > 0, "nothing was held");
    for one in &early {
        let allowed = [Failure::TimedOut, Failure::Os(libc::ECANCELED)];
        assert!(allowed.contains(&one.result.unwrap_err()));
    }
    let started = (1..5).filter(|id| engine.is_started(OperationId(*id)));
    assert_eq!(
        started.count(),
        held,
        "the rest still belongs to the kernel"
    );
    assert_eq!(engine.queue().stuck, held);
    assert!(!engine.shutdown(Duration::from_millis(100)));

    mount.signal(Signal::CONT);
    let late = completions.wait(held, SOON);
    assert_eq!(late.len(), held);
    // Given back: whatever the kernel still did to them would show.
    let mark = vec![0xA5; 8 * ROW];
    assert!(arena.copy_in(0, &mark));
    SystemClock.sleep(Duration::from_millis(300));
    assert!(arena.bytes(0, 8 * ROW).unwrap() == mark);
    assert!(engine.shutdown(SOON));
}
