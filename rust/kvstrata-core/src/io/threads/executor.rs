//! One operation on one thread: descriptor, alignment, calls.

use core::fmt::{self, Debug};

use crate::io::alter::Alter;
use crate::io::file::FileCache;
use crate::io::settle::{Passage, Settler, before_read};
use crate::io::transfer::{Calls, run};
use crate::io::work::{Mode, errno, fit, look, pause_before};
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
pub struct FileExecutor {
    files: Arc<FileCache>,
    clock: Arc<dyn Clock>,
    mode: Mode,
    settler: Settler,
    alter: Option<Alter>,
}

impl Debug for FileExecutor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FileExecutor")
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
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
            mode: Mode::new(direct, alignment, false),
            settler: Settler::default(),
            alter: None,
        }
    }

    /// Has the page cache forget the rows that go through it.
    #[must_use]
    pub fn with_small_cache(mut self) -> Self {
        let (direct, alignment) = self.mode.now();
        self.mode = Mode::new(direct, alignment, true);
        self
    }

    /// For tests: every answer of the kernel goes through `alter`.
    #[must_use]
    pub fn with_alter(mut self, alter: Alter) -> Self {
        self.alter = Some(alter);
        self
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
                let direct = work.transfer.direct();
                let executed = self.mode.finish(operation, work, bounce);
                if self.mode.settles()
                    && let Some(passage) = Passage::of(operation, direct)
                {
                    self.settler.settle(&self.files, passage);
                }
                executed
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

impl FileCalls<'_> {
    /// What a test makes of the kernel's answer.
    fn altered(&self, alter: &Alter, truth: Result<usize, Failure>) -> Result<usize, Failure> {
        let truth = match truth {
            Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
            Err(Failure::Os(errno)) => errno.saturating_neg(),
            Err(other) => return Err(other),
        };
        let answer = alter(self.operation, truth);
        if !answer.after.is_zero() {
            self.executor.clock.sleep(answer.after);
        }
        usize::try_from(answer.result).map_err(|_| Failure::Os(answer.result.saturating_neg()))
    }
}

impl Calls for FileCalls<'_> {
    fn call(
        &mut self,
        direct: Direct,
        vectors: &[IoVector],
        offset: u64,
    ) -> Result<usize, Failure> {
        let opened = look(&self.executor.files, &self.operation.file, direct);
        let file = fit(opened, self.operation, vectors, offset)?;
        if self.executor.mode.settles() {
            before_read(self.operation, direct, &file);
        }
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
        let result = result.map_err(|error| Failure::Os(errno(&error)));
        match &self.executor.alter {
            Some(alter) => self.altered(alter, result),
            None => result,
        }
    }

    fn pause(&mut self, retry: u32) -> bool {
        if self.executor.clock.now() >= self.operation.deadline {
            return false;
        }
        self.executor.clock.sleep(pause_before(retry));
        true
    }
}
