//! One operation on one thread: descriptor, alignment, calls.

use core::fmt::Debug;

use crate::io::file::FileCache;
use crate::io::transfer::{Calls, run};
use crate::io::work::{Mode, errno, open, pause_before};
use crate::io::{Alignment, Direction, EngineCounters, Failure, Operation};
use crate::sys::clock::Clock;
use crate::sys::fs::{Direct, IoVector};
use crate::sys::sync::Arc;

pub use crate::io::plan::Bounce;
pub use crate::io::work::Executed;

/// Does an operation on the calling thread; may block. The seam between the queue of the
/// `threads` engine and the file system.
pub trait Executor: Send + Sync + Debug {
    /// Moves the bytes of `operation`. `bounce` is the calling thread's own.
    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed;

    /// See [`crate::io::Engine::requirements`].
    fn requirements(&self) -> Alignment;

    /// Counts of what has been executed.
    fn counters(&self) -> EngineCounters;
}

/// Executes with `preadv` and `pwritev`.
#[derive(Debug)]
pub struct FileExecutor {
    files: Arc<FileCache>,
    clock: Arc<dyn Clock>,
    mode: Mode,
}

impl FileExecutor {
    /// An executor for files of one root. With `direct`, rows go round the page cache, with the
    /// alignment given, until the file system refuses.
    pub fn new(
        files: Arc<FileCache>,
        clock: Arc<dyn Clock>,
        direct: Direct,
        alignment: Alignment,
    ) -> Self {
        Self {
            files,
            clock,
            mode: Mode::new(direct, alignment),
        }
    }
}

impl Executor for FileExecutor {
    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed {
        match self.mode.prepare(operation, bounce) {
            Ok(mut work) => {
                let mut calls = FileCalls {
                    executor: self,
                    operation,
                };
                run(&mut work.transfer, &mut calls);
                self.mode.finish(operation, work, bounce)
            }
            Err(failure) => Executed {
                transferred_bytes: 0,
                result: Err(failure),
            },
        }
    }

    fn requirements(&self) -> Alignment {
        self.mode.requirements()
    }

    fn counters(&self) -> EngineCounters {
        self.mode.counters()
    }
}

/// Calls on the operation's file.
struct FileCalls<'a> {
    executor: &'a FileExecutor,
    operation: &'a Operation,
}

impl Calls for FileCalls<'_> {
    fn call(
        &mut self,
        direct: Direct,
        vectors: &[IoVector],
        offset: u64,
    ) -> Result<usize, Failure> {
        let file = open(
            &self.executor.files,
            self.operation,
            direct,
            vectors,
            offset,
        )?;
        #[expect(
            unsafe_code,
            reason = "the engine owns the operation's memory during the call"
        )]
        // SAFETY: the vectors were made from the operation's segments, each within its memory, and
        // from the thread's bounce buffer. The operation holds handles of all of them and is
        // borrowed until the call returns; the rule of `buffer` keeps everybody else away.
        let result = unsafe {
            match self.operation.direction {
                Direction::Read => file.read_vectored_at(vectors, offset),
                Direction::Write => file.write_vectored_at(vectors, offset),
            }
        };
        result.map_err(|error| Failure::Os(errno(&error)))
    }

    fn pause(&mut self, retry: u32) -> bool {
        if self.executor.clock.now() >= self.operation.deadline {
            return false;
        }
        self.executor.clock.sleep(pause_before(retry));
        true
    }
}
