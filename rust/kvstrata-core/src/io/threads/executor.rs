//! One operation on one thread: descriptor, alignment, calls.

use core::fmt::Debug;
use core::time::Duration;

use crate::io::file::FileCache;
use crate::io::plan::Plan;
use crate::io::transfer::{Calls, Request, run};
use crate::io::{Alignment, Channel, Direction, EngineCounters, Failure, Operation};
use crate::sys::clock::Clock;
use crate::sys::fs::{Direct, IoVector};
use crate::sys::sync::Arc;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use crate::io::plan::Bounce;

/// First pause after `EAGAIN` or `EMFILE`; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Bytes that were moved, from the front of the range.
    pub transferred_bytes: u64,
    /// Ok only when every byte was moved.
    pub result: Result<(), Failure>,
}

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
    files: FileCache,
    clock: Arc<dyn Clock>,
    alignment: Alignment,
    direct: AtomicBool,
    bounced_bytes: AtomicU64,
    resumed_transfers: AtomicU64,
    retried_calls: AtomicU64,
    buffered_operations: AtomicU64,
}

impl FileExecutor {
    /// An executor for files of one root. With `direct`, rows go round the page cache, with the
    /// alignment given, until the file system refuses.
    pub fn new(
        files: FileCache,
        clock: Arc<dyn Clock>,
        direct: Direct,
        alignment: Alignment,
    ) -> Self {
        Self {
            files,
            clock,
            alignment,
            direct: AtomicBool::new(direct == Direct::Yes),
            bounced_bytes: AtomicU64::new(0),
            resumed_transfers: AtomicU64::new(0),
            retried_calls: AtomicU64::new(0),
            buffered_operations: AtomicU64::new(0),
        }
    }

    /// Whether this operation goes round the page cache. One whose range is not aligned cannot.
    fn direct(&self, operation: &Operation, bytes: u64) -> Direct {
        if operation.channel == Channel::Table || !self.direct.load(Ordering::Relaxed) {
            return Direct::No;
        }
        let unit = u64::try_from(self.alignment.offset_bytes).unwrap_or(1);
        if operation.offset.is_multiple_of(unit) && bytes.is_multiple_of(unit) {
            Direct::Yes
        } else {
            Self::add(&self.buffered_operations, 1);
            Direct::No
        }
    }

    fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    fn transfer(&self, operation: &Operation, bounce: &mut Bounce) -> Result<Executed, Failure> {
        let bytes = operation.bytes();
        operation
            .offset
            .checked_add(bytes)
            .ok_or(Failure::Os(libc::EINVAL))?;
        let direct = self.direct(operation, bytes);
        let alignment = if direct == Direct::Yes {
            self.alignment
        } else {
            Alignment::NONE
        };
        let plan = Plan::new(&operation.segments, alignment).ok_or(Failure::Os(libc::EINVAL))?;
        let mut buffer = bounce
            .take(plan.bounce_bytes())
            .map_err(|_| Failure::Os(libc::ENOMEM))?;
        if let Some(buffer) = &mut buffer {
            let bounced = u64::try_from(plan.bounced_bytes()).unwrap_or(u64::MAX);
            Self::add(&self.bounced_bytes, bounced);
            if operation.direction == Direction::Write {
                plan.fill(&operation.segments, buffer);
            }
        }
        let request = Request {
            direction: operation.direction,
            vectors: plan.vectors(buffer.as_ref()),
            offset: operation.offset,
            alignment,
            direct,
        };
        let moved = run(
            request,
            &mut FileCalls {
                executor: self,
                operation,
            },
        );
        if let Some(buffer) = &buffer
            && operation.direction == Direction::Read
        {
            plan.empty(&operation.segments, buffer);
        }
        bounce.keep(buffer);
        Self::add(&self.resumed_transfers, moved.resumed_transfers);
        Self::add(&self.retried_calls, moved.retried_calls);
        if moved.direct_refused {
            self.direct.store(false, Ordering::Relaxed);
            Self::add(&self.buffered_operations, 1);
        }
        Ok(Executed {
            transferred_bytes: moved.transferred_bytes,
            result: moved.result,
        })
    }
}

impl Executor for FileExecutor {
    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed {
        self.transfer(operation, bounce)
            .unwrap_or_else(|failure| Executed {
                transferred_bytes: 0,
                result: Err(failure),
            })
    }

    fn requirements(&self) -> Alignment {
        if self.direct.load(Ordering::Relaxed) {
            self.alignment
        } else {
            Alignment::NONE
        }
    }

    fn counters(&self) -> EngineCounters {
        EngineCounters {
            bounced_bytes: self.bounced_bytes.load(Ordering::Relaxed),
            resumed_transfers: self.resumed_transfers.load(Ordering::Relaxed),
            retried_calls: self.retried_calls.load(Ordering::Relaxed),
            buffered_operations: self.buffered_operations.load(Ordering::Relaxed),
            replaced_threads: 0,
        }
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
        let opened = self.executor.files.get(&self.operation.file, direct);
        let (file, size_bytes) = match opened {
            Ok(opened) => opened,
            Err(error) if matches!(errno(&error), libc::EMFILE | libc::ENFILE) => {
                // No descriptor is left: close some of ours and try again in a moment.
                self.executor.files.shrink();
                return Err(Failure::Os(libc::EAGAIN));
            }
            Err(error) => return Err(Failure::Os(errno(&error))),
        };
        let asked: usize = vectors.iter().map(IoVector::length).sum();
        let end = u64::try_from(asked)
            .ok()
            .and_then(|asked| offset.checked_add(asked));
        if end.is_none_or(|end| end > size_bytes) && self.operation.direction == Direction::Write {
            return Err(Failure::Short);
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
        result.map_err(|error| Failure::Os(errno(&error)))
    }

    fn pause(&mut self, retry: u32) -> bool {
        if self.executor.clock.now() >= self.operation.deadline {
            return false;
        }
        let factor = 1_u32
            .checked_shl(retry.saturating_sub(1))
            .unwrap_or(u32::MAX);
        self.executor
            .clock
            .sleep(PAUSE_MIN.saturating_mul(factor).min(PAUSE_MAX));
        true
    }
}

/// The errno of an error, `EIO` where it has none.
fn errno(error: &std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(match error.kind() {
        std::io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    })
}
