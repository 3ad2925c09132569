//! What the tests of engines share: roots, files, operations.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(
    dead_code,
    reason = "each test binary uses a part, so no `expect` fits all"
)]

pub(crate) mod mount;

use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::io::alter::Alter;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::threads::{Executed, Executor, FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::uring::{Settings, Uring};
use kvstrata_core::io::{
    Alignment, Channel, Completion, CompletionSink, DataFile, Direction, Engine, Failure, Memory,
    Operation, OperationId, Prelude, Segment, Started,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};
use kvstrata_testkit::Completions;

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A directory that is removed at the end.
pub(crate) struct Root {
    pub(crate) directory: Arc<Directory>,
    holder: tempfile::TempDir,
}

impl Root {
    /// On the disk that holds the build.
    pub(crate) fn disk() -> Self {
        Self::within(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    /// In memory.
    pub(crate) fn memory() -> Self {
        Self::within(kvstrata_testkit::memory::folder().unwrap())
    }

    fn within(holder: tempfile::TempDir) -> Self {
        let directory = Directory::open_root(holder.path(), false, ShareMode::Private).unwrap();
        Self {
            directory: Arc::new(directory),
            holder,
        }
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        self.holder.path()
    }

    /// A new file of `bytes` zeros.
    pub(crate) fn file(&self, name: &str, bytes: u64) -> Arc<DataFile> {
        let file = self
            .directory
            .create_new(name, Access::Write, Direct::No)
            .unwrap();
        file.set_length(bytes).unwrap();
        DataFile::new(Arc::clone(&self.directory), name, Access::Write)
    }
}

/// The engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Threads,
    Ring,
}

/// Every engine that can work: where a sandbox denies the ring, that is one less.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kinds;

impl Kinds {
    /// What `each` makes of every engine.
    pub(crate) fn map<T>(self, each: impl FnMut(Kind) -> T) -> Vec<T> {
        self.into_iter().map(each).collect()
    }
}

impl IntoIterator for Kinds {
    type Item = Kind;
    type IntoIter = std::vec::IntoIter<Kind>;

    fn into_iter(self) -> Self::IntoIter {
        let mut kinds = vec![Kind::Threads, Kind::Ring];
        if ring_is_denied() {
            kinds.retain(|kind| *kind != Kind::Ring);
        }
        kinds.into_iter()
    }
}

/// Whether whoever runs the tests says that this process may not use `io_uring`.
pub(crate) fn ring_is_denied() -> bool {
    std::env::var_os("KVSTRATA_TEST_RING_DENIED").is_some()
}

impl Kind {
    pub(crate) const ALL: Kinds = Kinds;

    /// This engine over files, in the mode that the root's probe chose or buffered.
    pub(crate) fn start(
        self,
        root: &Root,
        direct: Direct,
        sink: CompletionSink,
    ) -> Arc<dyn Engine> {
        self.start_over(None, root, direct, sink)
    }

    /// This engine over files, through the page cache, which is to forget what went through it.
    pub(crate) fn start_with_small_cache(self, sink: CompletionSink) -> Arc<dyn Engine> {
        let mode = (Direct::No, Alignment::NONE);
        let clock = Arc::new(SystemClock);
        match self {
            Self::Threads => {
                Arc::new(Threads::with_mode(mode, true, files(), clock, sink).unwrap())
            }
            Self::Ring => {
                let settings = Settings {
                    small_cache: true,
                    ..Settings::default()
                };
                let ring = Uring::with_settings(&settings, mode, files(), clock, sink);
                Arc::new(ring.unwrap())
            }
        }
    }

    /// As [`Kind::start`], over a kernel that stumbles.
    pub(crate) fn start_over(
        self,
        kernel: Option<Alter>,
        root: &Root,
        direct: Direct,
        sink: CompletionSink,
    ) -> Arc<dyn Engine> {
        match self {
            Self::Threads => {
                let (direct, alignment) = mode(root, direct);
                let clock = Arc::new(SystemClock);
                let mut executor = FileExecutor::new(files(), clock, direct, alignment);
                if let Some(kernel) = kernel {
                    executor = executor.with_alter(kernel);
                }
                let clock = Arc::new(SystemClock);
                let counts = ThreadCounts::of_process(false);
                Arc::new(start(Arc::new(executor), clock, counts, sink))
            }
            Self::Ring => {
                let settings = Settings {
                    alter: kernel,
                    ..Settings::default()
                };
                Arc::new(ring(root, direct, &settings, sink))
            }
        }
    }
}

fn files() -> Arc<FileCache> {
    Arc::new(FileCache::new(24))
}

/// The mode that the root's probe chose, or buffered.
fn mode(root: &Root, direct: Direct) -> (Direct, Alignment) {
    let found = probe(&root.directory, "threads").unwrap();
    match direct {
        Direct::Yes => (found.direct, found.alignment),
        Direct::No => (Direct::No, Alignment::NONE),
    }
}

/// A ring over files, in the mode that the root's probe chose or buffered.
pub(crate) fn ring(
    root: &Root,
    direct: Direct,
    settings: &Settings,
    sink: CompletionSink,
) -> Uring {
    let clock = Arc::new(SystemClock);
    Uring::with_settings(settings, mode(root, direct), files(), clock, sink).unwrap()
}

pub(crate) fn start(
    executor: Arc<dyn Executor>,
    clock: Arc<dyn Clock>,
    counts: ThreadCounts,
    sink: CompletionSink,
) -> Threads {
    Threads::with_executor(executor, clock, counts, sink).unwrap()
}

pub(crate) fn segment(arena: &Arc<Arena>, offset: usize, length: usize) -> Segment {
    Segment {
        memory: Memory::Arena(Arc::clone(arena)),
        offset,
        length,
    }
}

/// An operation on rows that has 60 s to start.
pub(crate) fn operation(
    id: u64,
    direction: Direction,
    file: &Arc<DataFile>,
    offset: u64,
    segments: Vec<Segment>,
) -> Operation {
    Operation {
        started: Started::default(),
        prelude: Prelude::NONE,
        id: OperationId(id),
        direction,
        file: Arc::clone(file),
        channel: Channel::Rows,
        offset,
        segments,
        deadline: SystemClock.now() + Duration::from_mins(1),
    }
}

/// Submits one operation and waits for its end.
pub(crate) fn run(
    engine: &dyn Engine,
    completions: &Completions,
    operation: Operation,
) -> Completion {
    engine.submit(vec![operation]);
    let mut arrived = completions.wait(1, SOON);
    assert_eq!(arrived.len(), 1);
    arrived.remove(0)
}

/// The result of one operation.
pub(crate) fn result(
    engine: &dyn Engine,
    completions: &Completions,
    operation: Operation,
) -> Result<(), Failure> {
    run(engine, completions, operation).result
}

/// An execution that did everything.
pub(crate) fn all_of(operation: &Operation) -> Executed {
    Executed {
        transferred_bytes: operation.bytes(),
        result: Ok(()),
    }
}
