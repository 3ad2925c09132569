//! Files that hang beside files that do not: a stopped FUSE daemon under both engines. Needs
//! `bindfs`; says so where it is missing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;
use std::time::Duration;

use engine_support::mount::{Mount, drop_cache};
use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::buffer::Arena;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::threads::ThreadCounts;
use kvstrata_core::io::threads::Threads;
use kvstrata_core::io::uring::Uring;
use kvstrata_core::io::{Completion, DataFile, Direction, Engine, Failure, Operation, OperationId};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use rustix::process::Signal;

const ROW: usize = 65536;
const DEADLINE: Duration = Duration::from_secs(1);

/// How many may hang on one file.
fn threads() -> usize {
    ThreadCounts::of_process(false).working
}

struct Bench {
    engine: Arc<dyn Engine>,
    completions: Completions,
    bad: Arc<DataFile>,
    good: Arc<DataFile>,
    arena: Arc<Arena>,
    mount: Mount,
    _root: Root,
}

impl Bench {
    /// An engine with a file on a mount that will hang and one on the disk; None without FUSE.
    fn new(kind: Kind) -> Option<Self> {
        let (mount, root) = (Mount::new()?, Root::disk());
        let directory = Directory::open_root(&mount.path(), false, ShareMode::Private).unwrap();
        let directory = Arc::new(directory);
        let made = directory
            .create_new("rows", Access::Write, Direct::No)
            .unwrap();
        made.set_length(64 << 20).unwrap();
        drop(made);
        let completions = Completions::default();
        let (files, clock) = (Arc::new(FileCache::new(24)), Arc::new(SystemClock));
        let sink = completions.sink();
        let engine: Arc<dyn Engine> = match kind {
            Kind::Threads => {
                let found = probe(&directory, "auto").unwrap();
                assert_eq!((found.io_backend, found.may_hang), ("threads", true));
                let said = "io_uring is not taken on fuse unless asked for";
                assert!(found.to_string().contains(said), "{found}");
                Arc::new(Threads::start(&found, files, clock, sink).unwrap())
            }
            Kind::Ring => {
                let found = probe(&directory, "uring").unwrap();
                Arc::new(Uring::start(&found, files, clock, sink).unwrap())
            }
        };
        Some(Self {
            engine,
            completions,
            bad: DataFile::new(directory, "rows", Access::Write),
            good: root.file("rows", 64 << 20),
            arena: leaked_arena(200 * ROW, 0).unwrap(),
            mount,
            _root: root,
        })
    }

    fn read(&self, id: u64, file: &Arc<DataFile>, deadline: Duration) -> Operation {
        let slot = usize::try_from(id).unwrap() * ROW;
        let at = id % 100 * u64::try_from(ROW).unwrap();
        let segments = vec![segment(&self.arena, slot, ROW)];
        let mut read = operation(id, Direction::Read, file, at, segments);
        read.deadline = SystemClock.now() + deadline;
        read
    }

    /// Opens the bad file and leaves nothing of it in a cache.
    fn open_bad_file(&self) {
        let first = self.read(0, &self.bad, SOON);
        self.engine.submit(vec![first]);
        assert_eq!(self.completions.wait(1, SOON).remove(0).result, Ok(()));
        drop_cache(&self.mount.path());
    }

    /// 100 reads of the bad file, then 100 of the good one. Returns how many of the first are held
    /// by the kernel when all others have ended.
    fn read_both(&self) -> usize {
        self.mount.signal(Signal::STOP);
        let begin = SystemClock.now();
        let bad = (0..100).map(|id| self.read(id, &self.bad, DEADLINE));
        self.engine.submit(bad.collect());
        let good = (100..200).map(|id| self.read(id, &self.good, SOON));
        self.engine.submit(good.collect());
        let done = self.completions.wait(100, SOON);
        assert!(done.iter().all(|one| one.result == Ok(())));
        assert!(done.iter().all(|one| one.operation.id >= OperationId(100)));
        let took = SystemClock.now() - begin;
        assert!(took < DEADLINE, "{took:?}: the good waited for the bad");

        SystemClock.sleep((DEADLINE + Duration::from_millis(10)).saturating_sub(took));
        self.engine.expire(SystemClock.now());
        let is_held = |id: &u64| self.engine.is_started(OperationId(*id));
        let mut ended: Vec<Completion> = Vec::new();
        let until = SystemClock.now() + Duration::from_millis(300);
        while ended.len() + (0..100).filter(is_held).count() > 100 || SystemClock.now() < until {
            ended.extend(self.completions.wait(1, Duration::from_millis(100)));
        }
        let held = (0..100).filter(is_held).count();
        assert_eq!(ended.len() + held, 100);
        for one in &ended {
            let allowed = [Failure::TimedOut, Failure::Os(libc::ECANCELED)];
            assert!(allowed.contains(&one.result.unwrap_err()));
        }
        assert_eq!(self.engine.queue().stuck, held);
        // The threads in the place of the stuck ones, too, are there for others.
        let good = (100..200).map(|id| self.read(id, &self.good, SOON));
        self.engine.submit(good.collect());
        assert_eq!(self.completions.wait(100, SOON).len(), 100);
        held
    }

    /// Lets the mount go on, and everything end.
    fn end(self, held: usize) {
        let begin = SystemClock.now();
        assert_eq!(self.engine.shutdown(Duration::from_secs(1)), held == 0);
        let again = self.engine.shutdown(Duration::ZERO);
        assert_eq!(again, held == 0, "a second call does nothing");
        let took = SystemClock.now() - begin;
        assert!(took < Duration::from_secs(2), "{took:?}");
        self.mount.signal(Signal::CONT);
        let late = self.completions.wait(held, SOON);
        assert_eq!(late.len(), held);
        // Nothing was closed under them: there is no `EBADF`.
        for one in late {
            let allowed = [Ok(()), Err(Failure::Os(libc::ECANCELED))];
            assert!(allowed.contains(&one.result), "{:?}", one.result);
        }
        assert!(self.engine.shutdown(SOON));
    }
}

#[test]
fn reads_that_hang_hold_up_no_others_and_outlive_a_shutdown() {
    for kind in Kind::ALL {
        let Some(bench) = Bench::new(kind) else {
            return;
        };
        bench.open_bad_file();
        let held = bench.read_both();
        let most = if kind == Kind::Threads { threads() } else { 64 };
        assert!((1..=most).contains(&held), "{kind:?}: {held}");
        bench.end(held);
    }
}

#[test]
fn a_file_that_hangs_when_it_is_opened_holds_up_no_others() {
    for kind in Kind::ALL {
        let Some(bench) = Bench::new(kind) else {
            return;
        };
        let held = bench.read_both();
        match kind {
            // Each thread is in the call that opens, or waits for the one that is.
            Kind::Threads => assert_eq!(held, threads()),
            // Nothing was started in the kernel: all end at their deadline.
            Kind::Ring => assert_eq!(held, 0),
        }
        if kind == Kind::Ring {
            // The thread that opens hangs still.
            assert!(!bench.engine.shutdown(Duration::from_millis(100)));
            bench.mount.signal(Signal::CONT);
            assert!(bench.engine.shutdown(SOON));
        } else {
            bench.end(held);
        }
    }
}
