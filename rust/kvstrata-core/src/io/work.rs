//! What engines do alike before and after the kernel moves an operation's bytes.

use core::time::Duration;

use super::file::FileCache;
use super::plan::{Bounce, Plan};
use super::transfer::{Request, Transfer};
use super::{Alignment, Channel, DataFile, Direction, EngineCounters, Failure, Operation};
use crate::buffer::AlignedBuffer;
use crate::sys::fs::{Direct, File, IoVector};
use crate::sys::sync::Arc;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// First pause after `EAGAIN` or `EMFILE`; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Largest offset the kernel takes.
const OFFSET_MAX: u64 = i64::MAX.cast_unsigned();

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Bytes that were moved, from the front of the range.
    pub transferred_bytes: u64,
    /// Ok only when every byte was moved.
    pub result: Result<(), Failure>,
}

/// An operation ready for the kernel. The transfer's vectors point into the operation's memory and
/// into `bounce`: both are kept until the kernel has returned every call on them.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) transfer: Transfer,
    plan: Plan,
    bounce: Option<AlignedBuffer>,
}

impl Work {
    /// Bytes of bounce buffer that it holds.
    pub(super) fn bounce_bytes(&self) -> usize {
        self.bounce.as_ref().map_or(0, |buffer| buffer.len())
    }
}

/// Whether and how operations go round the page cache, and counts of what was done.
#[derive(Debug)]
pub(super) struct Mode {
    alignment: Alignment,
    direct: AtomicBool,
    settles: bool,
    bounced_bytes: AtomicU64,
    resumed_transfers: AtomicU64,
    retried_calls: AtomicU64,
    buffered_operations: AtomicU64,
}

impl Mode {
    /// With `direct`, rows go round the page cache, with the alignment given, until the file
    /// system refuses. With `settles`, those that go through it are forgotten there.
    pub(super) const fn new(direct: Direct, alignment: Alignment, settles: bool) -> Self {
        Self {
            alignment,
            direct: AtomicBool::new(matches!(direct, Direct::Yes)),
            settles,
            bounced_bytes: AtomicU64::new(0),
            resumed_transfers: AtomicU64::new(0),
            retried_calls: AtomicU64::new(0),
            buffered_operations: AtomicU64::new(0),
        }
    }

    /// See [`super::Engine::requirements`].
    pub(super) fn requirements(&self) -> Alignment {
        if self.direct.load(Ordering::Relaxed) {
            self.alignment
        } else {
            Alignment::NONE
        }
    }

    /// How rows are moved now.
    pub(super) fn now(&self) -> (Direct, Alignment) {
        match self.requirements() {
            Alignment::NONE => (Direct::No, Alignment::NONE),
            alignment => (Direct::Yes, alignment),
        }
    }

    /// Whether what goes through the page cache is to be forgotten there.
    pub(super) const fn settles(&self) -> bool {
        self.settles
    }

    /// Counts of what was done; no thread was replaced.
    pub(super) fn counters(&self) -> EngineCounters {
        EngineCounters {
            bounced_bytes: self.bounced_bytes.load(Ordering::Relaxed),
            resumed_transfers: self.resumed_transfers.load(Ordering::Relaxed),
            retried_calls: self.retried_calls.load(Ordering::Relaxed),
            buffered_operations: self.buffered_operations.load(Ordering::Relaxed),
            replaced_threads: 0,
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
            add(&self.buffered_operations, 1);
            Direct::No
        }
    }

    /// Plans the transfer of `operation`; what is to be written and not aligned is copied.
    ///
    /// # Errors
    /// `EINVAL` for what lies outside its memory or the kernel's numbers; `ENOMEM`.
    pub(super) fn prepare(
        &self,
        operation: &Operation,
        bounce: &mut Bounce,
    ) -> Result<Work, Failure> {
        let bytes = operation.bytes();
        operation
            .offset
            .checked_add(bytes)
            .filter(|end| *end <= OFFSET_MAX)
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
            add(&self.bounced_bytes, bounced);
            if operation.direction == Direction::Write {
                plan.fill(&operation.segments, buffer);
            }
        }
        let transfer = Transfer::new(Request {
            direction: operation.direction,
            vectors: plan.vectors(buffer.as_ref()),
            offset: operation.offset,
            alignment,
            direct,
        });
        Ok(Work {
            transfer,
            plan,
            bounce: buffer,
        })
    }

    /// Ends work that the kernel has returned: what was read and not aligned is copied.
    pub(super) fn finish(
        &self,
        operation: &Operation,
        work: Work,
        bounce: &mut Bounce,
    ) -> Executed {
        let moved = work.transfer.moved();
        if let Some(buffer) = work.bounce {
            if operation.direction == Direction::Read {
                work.plan.empty(&operation.segments, &buffer);
            }
            bounce.keep(buffer);
        }
        add(&self.resumed_transfers, moved.resumed_transfers);
        add(&self.retried_calls, moved.retried_calls);
        if moved.direct_refused {
            self.direct.store(false, Ordering::Relaxed);
            add(&self.buffered_operations, 1);
        }
        Executed {
            transferred_bytes: moved.transferred_bytes,
            result: moved.result,
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// A file's descriptor and its length in bytes.
pub(super) type Opened = Result<(Arc<File>, u64), Failure>;

/// The descriptor of `file`, opened if need be, and the length it has now. May block.
///
/// # Errors
/// `EAGAIN` while no descriptor is to be had; as [`FileCache::get`].
pub(super) fn look(files: &FileCache, file: &Arc<DataFile>, direct: Direct) -> Opened {
    files.get(file, direct).map_err(|error| refusal(&error))
}

fn refusal(error: &std::io::Error) -> Failure {
    match errno(error) {
        // No descriptor is left, not even after the cache gave some up: others may soon.
        libc::EMFILE | libc::ENFILE => Failure::Os(libc::EAGAIN),
        errno => Failure::Os(errno),
    }
}

/// The descriptor for a call of `operation` on `vectors` at `offset`.
///
/// # Errors
/// `Short` when a write would make the file longer; that of `opened`.
pub(super) fn fit(
    opened: Opened,
    operation: &Operation,
    vectors: &[IoVector],
    offset: u64,
) -> Result<Arc<File>, Failure> {
    let (file, size_bytes) = opened?;
    let asked: usize = vectors.iter().map(IoVector::length).sum();
    let end = u64::try_from(asked)
        .ok()
        .and_then(|asked| offset.checked_add(asked));
    if end.is_none_or(|end| end > size_bytes) && operation.direction == Direction::Write {
        return Err(Failure::Short);
    }
    Ok(file)
}

/// How long to wait before retry number `retry`.
pub(super) fn pause_before(retry: u32) -> Duration {
    let factor = 1_u32
        .checked_shl(retry.saturating_sub(1))
        .unwrap_or(u32::MAX);
    PAUSE_MIN.saturating_mul(factor).min(PAUSE_MAX)
}

/// The errno of an error, `EIO` where it has none.
pub(super) fn errno(error: &std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(match error.kind() {
        std::io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    })
}
