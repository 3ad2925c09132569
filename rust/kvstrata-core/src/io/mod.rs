//! Moving bytes between memory and row files.
//!
//! An [`Engine`] takes owned [`Operation`]s and hands each back exactly once in a [`Completion`].
//! In between the engine owns the operation's memory handles and file: nothing that the kernel may
//! still touch is freed, whoever loses interest. All engines keep one contract, stated at
//! [`Engine`] and tested by one suite.

pub mod alter;
pub mod file;
mod intake;
mod plan;
pub mod probe;
mod queue;
mod settle;
mod start;
pub mod threads;
mod transfer;
pub mod uring;
mod work;

use core::fmt::{self, Debug};
use core::time::Duration;
use std::time::Instant;

pub use crate::buffer::Memory;
use crate::sys::fs::File;
use crate::sys::sync::{Arc, OnceLock};
pub use file::DataFile;
pub use probe::Capabilities;
pub use start::start;

/// Number of an operation, never used twice with one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub u64);

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// Which part of a row file an operation is for. The two parts never share a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Rows: round the page cache where the root allows it.
    Rows,
    /// Superblock, change page and row table: through the page cache, so that a reader sees an
    /// entry as soon as it is written.
    Table,
}

/// A piece of memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// What it is a piece of.
    pub memory: Memory,
    /// Where it starts, in bytes.
    pub offset: usize,
    /// How long it is, in bytes.
    pub length: usize,
}

/// A transfer between one range of a file and pieces of memory, in order.
///
/// The range lies within the file: an operation never makes a file longer. On
/// [`Channel::Rows`] pieces of any alignment are accepted; those that meet
/// [`Engine::requirements`] are moved without a copy.
#[derive(Debug)]
pub struct Operation {
    /// The caller's number for it.
    pub id: OperationId,
    /// Which way.
    pub direction: Direction,
    /// The file.
    pub file: Arc<DataFile>,
    /// Which part of the file.
    pub channel: Channel,
    /// Where in the file, in bytes.
    pub offset: u64,
    /// The memory; its lengths add up to the range's length.
    pub segments: Vec<Segment>,
    /// When it is too late to start.
    pub deadline: Instant,
    /// When the engine started it.
    pub started: Started,
    /// What its engine does first.
    pub prelude: Prelude,
}

/// When an operation was started: set once, by its engine.
#[derive(Clone, Debug, Default)]
pub struct Started(OnceLock<Instant>);

impl Started {
    /// Notes that it starts now, by the engine's clock; a second start changes nothing.
    fn note(&self, now: Instant) {
        let _ = self.0.set(now);
    }

    /// When it started; `None` while it has not.
    pub fn at(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}

/// Work that an engine does on its own thread just before it hands an operation to the kernel: what
/// is summed up then is still in the processor's cache when the device asks for it, and no more of
/// it than the device can take at a time. By then the operation's memory is the engine's.
#[derive(Default)]
pub struct Prelude(Option<Box<dyn FnOnce() + Send>>);

impl Prelude {
    /// Nothing.
    pub const NONE: Self = Self(None);

    /// This. A panic of it poisons the engine.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(work)))
    }
}

impl Debug for Prelude {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if self.0.is_some() { "due" } else { "none" };
        write!(formatter, "Prelude({text})")
    }
}

impl Operation {
    /// Whether its prelude is yet to be done.
    pub(crate) const fn has_prelude(&self) -> bool {
        self.prelude.0.is_some()
    }

    /// What every engine calls when it starts the operation at `now`, by its clock: notes the time
    /// and does the prelude, unless that was done before. Says whether there was one.
    pub fn begin(&mut self, now: Instant) -> bool {
        self.started.note(now);
        let prelude = self.prelude.0.take();
        let is_due = prelude.is_some();
        if let Some(work) = prelude {
            work();
        }
        is_due
    }

    /// Bytes to move; `u64::MAX` when the sum overflows.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().fold(0_u64, |sum, segment| {
            sum.saturating_add(u64::try_from(segment.length).unwrap_or(u64::MAX))
        })
    }
}

/// Why an operation did not move all its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// The file ends before the range does. Nothing was written.
    Short,
    /// The operating system's errno (positive). `ENOENT` also for a file that was unlinked,
    /// `EINVAL` also for segments outside their memory, `EIO` also for a write that the kernel
    /// accepted without taking a byte, `ECANCELED` for one that was started, and given up by the
    /// kernel after its deadline.
    Os(i32),
    /// The deadline passed before it was started; its memory and file were never touched.
    TimedOut,
    /// The engine was shut down before it was started.
    Closed,
    /// The engine has panicked and does nothing any more. Of an operation that was started, any
    /// part may have been done.
    Poisoned,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => formatter.write_str("the file ends before the row does"),
            Self::Os(errno) => {
                fmt::Display::fmt(&std::io::Error::from_raw_os_error(*errno), formatter)
            }
            Self::TimedOut => formatter.write_str("not started by its deadline"),
            Self::Closed => formatter.write_str("the tier is closing"),
            Self::Poisoned => formatter.write_str("the I/O engine ended by a panic"),
        }
    }
}

/// The end of an operation: everything the engine owned comes back.
#[derive(Debug)]
pub struct Completion {
    /// The operation as it was submitted.
    pub operation: Operation,
    /// Ok only when every byte was moved.
    pub result: Result<(), Failure>,
    /// Bytes that were moved, from the front of the range.
    pub transferred_bytes: u64,
}

/// Where completions go: called on the engine's own threads, one call per operation, with none of
/// the engine's locks held. It may submit. A sink that panics poisons the engine.
pub type CompletionSink = Arc<dyn Fn(Completion) + Send + Sync>;

/// Alignment in bytes that direct transfers need; 1 and 1 where anything goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of memory addresses.
    pub memory_bytes: usize,
    /// Of file offsets and of the length of every segment.
    pub offset_bytes: usize,
}

impl Alignment {
    /// No requirement.
    pub const NONE: Self = Self {
        memory_bytes: 1,
        offset_bytes: 1,
    };

    /// The alignment of slots and rows that satisfies both.
    pub fn slot_bytes(self) -> usize {
        self.memory_bytes.max(self.offset_bytes)
    }
}

/// What an engine holds at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    /// Reads not yet started.
    pub queued_reads: usize,
    /// Writes not yet started.
    pub queued_writes: usize,
    /// Operations that the kernel has.
    pub in_flight: usize,
    /// Of these, operations past their deadline.
    pub stuck: usize,
}

/// What an engine has done since it was started; every number only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Bytes copied through a bounce buffer because their memory was not aligned.
    pub bounced_bytes: u64,
    /// Transfers that the kernel cut short and that were resumed.
    pub resumed_transfers: u64,
    /// Calls repeated after `EINTR`, `EAGAIN` or a lack of descriptors.
    pub retried_calls: u64,
    /// Operations that went through the page cache although direct I/O was asked for.
    pub buffered_operations: u64,
    /// Threads started because others were stuck.
    pub replaced_threads: u64,
}

impl EngineCounters {
    /// What two engines have done.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            bounced_bytes: self.bounced_bytes.saturating_add(other.bounced_bytes),
            resumed_transfers: self
                .resumed_transfers
                .saturating_add(other.resumed_transfers),
            retried_calls: self.retried_calls.saturating_add(other.retried_calls),
            buffered_operations: self
                .buffered_operations
                .saturating_add(other.buffered_operations),
            replaced_threads: self.replaced_threads.saturating_add(other.replaced_threads),
        }
    }
}

/// Moves bytes. What every engine promises:
///
/// * Each operation submitted completes exactly once, through the sink.
/// * A result is Ok only when all bytes were moved. A transfer cut short is resumed; one that
///   makes no progress fails. No loop is without bound.
/// * Reads go before writes; of eleven operations started while both wait, at least one is a
///   write. Within a direction operations start in the order of submission and complete in any.
/// * Before the first call for an operation its [`Operation::started`] is set.
/// * An operation that was started completes when the kernel returns it, however late. Deadlines
///   only end operations that were not started.
/// * An engine with nothing to do uses no CPU.
pub trait Engine: Send + Sync + Debug {
    /// Name as in the configuration.
    fn name(&self) -> &'static str;

    /// Takes operations. Never blocks, and holds nothing beyond what it is given: the caller
    /// bounds the bytes.
    fn submit(&self, operations: Vec<Operation>);

    /// Completes operations that were not started and whose deadline is at or before `now` with
    /// [`Failure::TimedOut`]; of those that are overdue it replaces the threads, or asks the kernel
    /// to give them up. To be called at the earliest deadline and now and then after it; never
    /// blocks.
    fn expire(&self, now: Instant);

    /// Keeps `file` open, and with it the lock it holds, for as long as the kernel has operations
    /// of this engine, even when the process is killed. An engine whose operations are calls of
    /// threads need do nothing: a process keeps its files until its last thread has returned.
    fn guard(&self, _file: &File) {}

    /// In a forked child, which has none of the engine's threads: closes the child's copies of what
    /// [`Engine::guard`] is about, which would keep the lock after the parent has ended. The parent
    /// notices nothing; the child must not use the engine.
    fn leave_to_parent(&self) {}

    /// Whether the kernel may be using the operation's memory: it was started and has not
    /// completed.
    fn is_started(&self, operation: OperationId) -> bool;

    /// What is waiting and under way.
    fn queue(&self) -> QueueDepth;

    /// What has been done.
    fn counters(&self) -> EngineCounters;

    /// Alignment of operations on [`Channel::Rows`] that are moved without a copy. It may relax
    /// (to [`Alignment::NONE`]) when the root turns out to refuse direct I/O; it never tightens.
    fn requirements(&self) -> Alignment;

    /// Whether a panic has ended the engine's work: every operation now fails.
    fn poisoned(&self) -> bool;

    /// Stops: operations not started complete as [`Failure::Closed`], as do those submitted from
    /// now on; those under way are waited for, `timeout` long at most. True when all have
    /// completed and the engine's threads have ended; what is stuck is left behind, with its
    /// memory and file, and may be waited for by calling again.
    fn shutdown(&self, timeout: Duration) -> bool;
}
