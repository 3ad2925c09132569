//! What the tests of engines share: roots, files, operations.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(
    dead_code,
    reason = "each test binary uses a part, so no `expect` fits all"
)]

use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::buffer::Arena;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::threads::{Executed, Executor, FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::{
    Alignment, Channel, Completion, CompletionSink, DataFile, Direction, Engine, Failure, Memory,
    Operation, OperationId, Segment,
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
        Self::within(env!("CARGO_TARGET_TMPDIR"))
    }

    /// In memory.
    pub(crate) fn memory() -> Self {
        Self::within("/dev/shm")
    }

    fn within(parent: &str) -> Self {
        let holder = tempfile::tempdir_in(parent).unwrap();
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

/// A `threads` engine over files, in the mode that the root's probe chose or buffered.
pub(crate) fn threads(root: &Root, direct: Direct, sink: CompletionSink) -> Threads {
    let found = probe(&root.directory, "threads").unwrap();
    let direct = if direct == Direct::Yes {
        found.direct
    } else {
        Direct::No
    };
    let alignment = if direct == Direct::Yes {
        found.alignment
    } else {
        Alignment::NONE
    };
    let executor = FileExecutor::new(
        Arc::new(FileCache::new(24)),
        Arc::new(SystemClock),
        direct,
        alignment,
    );
    start(
        Arc::new(executor),
        Arc::new(SystemClock),
        ThreadCounts::default(),
        sink,
    )
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
