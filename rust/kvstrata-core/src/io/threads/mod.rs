//! The `threads` engine: blocking calls on a few threads that sleep when there is nothing to do.
//!
//! A call that hangs (a dead mount) holds its thread. No file may hold as many threads as there
//! are, so that others go on meanwhile; and when an operation's deadline passes, [`Engine::expire`]
//! starts another thread in the place of its own, up to as many as may hang on one file. The late
//! thread ends when its call returns. Until then it owns the operation's memory, file and
//! descriptor: nothing is freed or closed under it, not even by a shutdown.

mod executor;
mod worker;

use core::time::Duration;
use std::io;
use std::time::Instant;

use rustix::process::{Resource, getrlimit};

use super::{
    Alignment, Capabilities, CompletionSink, Engine, EngineCounters, Operation, OperationId,
    QueueDepth,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::FileCache;
use crate::io::intake::{Intake, Intaken};
use crate::sys::clock::Clock;
use crate::sys::fs::Direct;
use crate::sys::sync::atomic::{AtomicU64, Ordering};
use crate::sys::sync::{Arc, Condvar};
use worker::{Idle, Shared};

pub use executor::{Bounce, Executed, Executor, FileExecutor};

/// Fewest and most threads of [`ThreadCounts::of_process`]: with 8, a fast device waits for calls of
/// 64 KiB.
const THREADS_MIN: usize = 8;
const THREADS_MAX: usize = 32;

/// Number of threads that work, and of those that may be started for stuck ones.
#[derive(Clone, Copy, Debug)]
pub struct ThreadCounts {
    /// Threads that may work on one file at a time, 1 at least. There are a quarter more, and at
    /// least one more, for other files.
    pub working: usize,
    /// Most replacements alive at a time.
    pub replacements_max: usize,
}

impl ThreadCounts {
    /// What suits the process: each thread may hold a file open that others have closed, so there
    /// is one for sixteen descriptors that the process may have, 8 at least and 32 at most. Where
    /// rows are in memory a call is a copy, and 8 are enough.
    pub fn of_process(in_memory: bool) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let part = usize::try_from(limit / 16).unwrap_or(THREADS_MAX);
        let most = if in_memory { THREADS_MIN } else { THREADS_MAX };
        let working = part.clamp(THREADS_MIN, most);
        Self {
            working,
            replacements_max: working,
        }
    }

    /// Threads that work.
    const fn all(self) -> usize {
        let per_file = self.per_file();
        per_file.saturating_add(per_file.div_ceil(4))
    }

    const fn per_file(self) -> usize {
        if self.working == 0 { 1 } else { self.working }
    }
}

/// The engine. Dropping it shuts it down without waiting.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
}

impl Threads {
    /// Starts the engine for files of the root with these capabilities.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] when not even one thread can be started.
    pub fn start(
        capabilities: &Capabilities,
        files: Arc<FileCache>,
        clock: Arc<dyn Clock>,
        sink: CompletionSink,
    ) -> Result<Self> {
        let mode = (capabilities.direct, capabilities.alignment);
        Self::with_mode(mode, !capabilities.in_memory(), files, clock, sink)
    }

    /// Starts the engine with rows moved in `mode`: direct or not, and the alignment it needs. With
    /// `small_cache` the page cache forgets the rows that go through it; without, it is where the
    /// rows are.
    ///
    /// # Errors
    /// As [`Threads::start`].
    pub fn with_mode(
        mode: (Direct, Alignment),
        small_cache: bool,
        files: Arc<FileCache>,
        clock: Arc<dyn Clock>,
        sink: CompletionSink,
    ) -> Result<Self> {
        let mut executor = FileExecutor::new(files, Arc::clone(&clock), mode.0, mode.1);
        if small_cache {
            executor = executor.with_small_cache();
        }
        let counts = ThreadCounts::of_process(!small_cache);
        Self::with_executor(Arc::new(executor), clock, counts, sink)
    }

    /// Starts the engine over another executor.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] when not even one thread can be started.
    pub fn with_executor(
        executor: Arc<dyn Executor>,
        clock: Arc<dyn Clock>,
        counts: ThreadCounts,
        sink: CompletionSink,
    ) -> Result<Self> {
        let intake = Intake::new(counts.per_file(), Idle::default(), clock, sink);
        let shared = Arc::new(Shared {
            intake: Arc::new(intake),
            work: Condvar::new(),
            executor,
            counts,
            replaced_threads: AtomicU64::new(0),
        });
        let engine = Self { shared };
        let unavailable = |error| {
            Error::new(ErrorKind::Unavailable, "no I/O thread can be started").with_source(error)
        };
        engine.shared.intake.start_refuser().map_err(unavailable)?;
        for number in 0..counts.all() {
            match engine.start_thread() {
                Ok(()) => {}
                Err(_) if number > 0 => {
                    let per_file = per_file_of(number);
                    engine.shared.intake.lock().queue.limit_per_file(per_file);
                    break;
                }
                Err(error) => return Err(unavailable(error)),
            }
        }
        Ok(engine)
    }

    fn start_thread(&self) -> io::Result<()> {
        let intake = &self.shared.intake;
        intake.lock().alive += 1;
        let shared = Arc::clone(&self.shared);
        let started = intake.spawn("kvstrata-io", move || shared.work());
        if started.is_err() {
            intake.lock().alive -= 1;
        }
        started
    }

    /// Stops admission and lets the threads end.
    fn close(&self) {
        self.shared.intake.close();
        self.shared.work.notify_all();
    }
}

impl Engine for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn submit(&self, operations: Vec<Operation>) {
        let count = operations.len();
        let sleepers = |state: &mut Intaken<Idle>| state.own.0.min(count);
        let sleepers = self.shared.intake.submit(operations, sleepers);
        for _ in 0..sleepers.unwrap_or(0) {
            self.shared.work.notify_one();
        }
    }

    fn expire(&self, now: Instant) {
        let replacements_max = self.shared.counts.replacements_max;
        let replace = |state: &mut Intaken<Idle>| {
            let room = replacements_max.saturating_sub(state.queue.replaced());
            if state.closing {
                0
            } else {
                state.queue.replace_overdue(now, room)
            }
        };
        for _ in 0..self.shared.intake.expire(now, replace) {
            if self.start_thread().is_ok() {
                self.shared.replaced_threads.fetch_add(1, Ordering::Relaxed);
            } else {
                self.shared.intake.lock().queue.unreplace_one();
            }
        }
    }

    fn is_started(&self, operation: OperationId) -> bool {
        self.shared.intake.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        self.shared.intake.depth()
    }

    fn counters(&self) -> EngineCounters {
        let replaced_threads = self.shared.replaced_threads.load(Ordering::Relaxed);
        EngineCounters {
            replaced_threads,
            ..self.shared.executor.counters()
        }
    }

    fn requirements(&self) -> Alignment {
        self.shared.executor.requirements()
    }

    fn poisoned(&self) -> bool {
        self.shared.intake.poisoned()
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.close();
        self.shared.intake.wait_for_end(timeout)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}

/// How many of so many threads may work on one file, where no more could be started.
const fn per_file_of(threads: usize) -> usize {
    let four_fifths = threads.saturating_mul(4) / 5;
    if four_fifths == 0 { 1 } else { four_fifths }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_few_threads_can_be_started_some_are_left_for_other_files_too() {
        for threads in 2..=THREADS_MAX * 2 {
            let counts = ThreadCounts {
                working: per_file_of(threads),
                replacements_max: 0,
            };
            assert!(counts.per_file() < threads && counts.all() <= threads);
            assert!(counts.all() + 1 >= threads, "{threads} threads");
        }
        assert_eq!(per_file_of(1), 1);
    }
}
