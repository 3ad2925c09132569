//! The `threads` engine: blocking calls on a few threads that sleep when there is nothing to do.
//!
//! A call that hangs (a dead mount) holds its thread. When its operation's deadline passes,
//! [`Engine::expire`] starts another thread in its place, up to as many as there were at first;
//! the late thread ends when its call returns. Until then it owns the operation's memory, file and
//! descriptor: nothing is freed or closed under it, not even by a shutdown.
//!
//! Operations that are not to be started (too late, closed, poisoned) are completed by a thread of
//! their own, so that they end even while every other thread hangs.

mod executor;

use core::fmt;
use core::time::Duration;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::{
    Alignment, Capabilities, Completion, CompletionSink, Engine, EngineCounters, Failure,
    Operation, OperationId, QueueDepth,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::FileCache;
use crate::io::queue::Queue;
use crate::sys::clock::Clock;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sys::sync::{Arc, Condvar, JoinHandle, Mutex, lock, spawn, wait, wait_timeout};

pub use executor::{Bounce, Executed, Executor, FileExecutor};

/// Default number of threads.
pub const THREADS: usize = 8;

/// Number of threads that work, and of those that may be started for stuck ones.
#[derive(Clone, Copy, Debug)]
pub struct ThreadCounts {
    /// Threads that work, 1 at least.
    pub working: usize,
    /// Most replacements alive at a time.
    pub replacements_max: usize,
}

impl Default for ThreadCounts {
    fn default() -> Self {
        Self {
            working: THREADS,
            replacements_max: THREADS,
        }
    }
}

/// The engine. Dropping it shuts it down without waiting.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Operations were queued, or the engine closes.
    work: Condvar,
    /// Operations were refused, or the engine closes or is poisoned.
    refusals: Condvar,
    /// A thread has ended.
    ended: Condvar,
    executor: Arc<dyn Executor>,
    clock: Arc<dyn Clock>,
    sink: CompletionSink,
    counts: ThreadCounts,
    poisoned: AtomicBool,
    replaced_threads: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    queue: Queue,
    idle: usize,
    alive: usize,
    refuser_alive: bool,
    closing: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("executor", &self.executor)
            .field("counts", &self.counts)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
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
        let executor = FileExecutor::new(
            files,
            Arc::clone(&clock),
            capabilities.direct,
            capabilities.alignment,
        );
        Self::with_executor(Arc::new(executor), clock, ThreadCounts::default(), sink)
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
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            refusals: Condvar::new(),
            ended: Condvar::new(),
            executor,
            clock,
            sink,
            counts,
            poisoned: AtomicBool::new(false),
            replaced_threads: AtomicU64::new(0),
        });
        let engine = Self {
            shared,
            handles: Mutex::default(),
        };
        let unavailable = |error| {
            Error::new(ErrorKind::Unavailable, "no I/O thread can be started").with_source(error)
        };
        engine.start_refuser().map_err(unavailable)?;
        for number in 0..counts.working.max(1) {
            match engine.start_thread() {
                Ok(()) => {}
                Err(_) if number > 0 => break,
                Err(error) => return Err(unavailable(error)),
            }
        }
        Ok(engine)
    }

    fn start_thread(&self) -> io::Result<()> {
        lock(&self.shared.state).alive += 1;
        let shared = Arc::clone(&self.shared);
        let started = self.keep(spawn("kvstrata-io", move || shared.work()));
        if started.is_err() {
            lock(&self.shared.state).alive -= 1;
        }
        started
    }

    /// Starts the thread that completes what is refused, unless it is there.
    fn start_refuser(&self) -> io::Result<()> {
        if core::mem::replace(&mut lock(&self.shared.state).refuser_alive, true) {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let started = self.keep(spawn("kvstrata-refuse", move || shared.refuse()));
        if started.is_err() {
            lock(&self.shared.state).refuser_alive = false;
        }
        started
    }

    fn keep(&self, started: io::Result<JoinHandle<()>>) -> io::Result<()> {
        let handle = started?;
        let mut handles = lock(&self.handles);
        handles.retain(|handle| !handle.is_finished());
        handles.push(handle);
        Ok(())
    }

    /// Stops admission and lets the threads end.
    fn close(&self) {
        lock(&self.shared.state).closing = true;
        self.shared.work.notify_all();
        self.shared.refusals.notify_all();
    }
}

impl Shared {
    /// The body of a thread that executes.
    fn work(&self) {
        let mut bounce = Bounce::default();
        while let Some(operation) = self.next_operation() {
            let executed = if operation.deadline <= self.clock.now() {
                Executed {
                    transferred_bytes: 0,
                    result: Err(Failure::TimedOut),
                }
            } else {
                self.execute(&operation, &mut bounce)
            };
            let was_replaced = lock(&self.state).queue.end(operation.id);
            self.complete(operation, executed);
            if was_replaced {
                break;
            }
        }
        lock(&self.state).alive -= 1;
        self.ended.notify_all();
    }

    /// Sleeps until there is an operation to start; None when the engine closes.
    fn next_operation(&self) -> Option<Operation> {
        let mut state = lock(&self.state);
        loop {
            if state.closing {
                return None;
            }
            if !self.poisoned.load(Ordering::Acquire)
                && let Some(operation) = state.queue.start()
            {
                return Some(operation);
            }
            state.idle += 1;
            state = wait(&self.work, state);
            state.idle -= 1;
        }
    }

    /// The body of the thread that completes what is not to be started.
    fn refuse(&self) {
        let mut state = lock(&self.state);
        loop {
            let (closing, poisoned) = (state.closing, self.poisoned.load(Ordering::Acquire));
            if let Some((operation, failure)) = state.queue.next_refusal(closing, poisoned) {
                drop(state);
                self.complete(
                    operation,
                    Executed {
                        transferred_bytes: 0,
                        result: Err(failure),
                    },
                );
                state = lock(&self.state);
            } else if state.closing {
                state.refuser_alive = false;
                break;
            } else {
                state = wait(&self.refusals, state);
            }
        }
        drop(state);
        self.ended.notify_all();
    }

    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed {
        let body = AssertUnwindSafe(|| self.executor.execute(operation, bounce));
        catch_unwind(body).unwrap_or_else(|_| {
            self.poison();
            Executed {
                transferred_bytes: 0,
                result: Err(Failure::Poisoned),
            }
        })
    }

    fn complete(&self, operation: Operation, executed: Executed) {
        let Executed {
            transferred_bytes,
            result,
        } = executed;
        debug_assert!(result.is_err() || transferred_bytes == operation.bytes());
        let completion = Completion {
            operation,
            result,
            transferred_bytes,
        };
        if catch_unwind(AssertUnwindSafe(|| (self.sink)(completion))).is_err() {
            self.poison();
        }
    }

    fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        // Taking the lock once orders this before the refuser's next look at the flag.
        drop(lock(&self.state));
        self.refusals.notify_all();
    }
}

impl Engine for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn submit(&self, operations: Vec<Operation>) {
        let count = operations.len();
        let mut state = lock(&self.shared.state);
        let closing = state.closing;
        let refuses = closing || self.poisoned();
        for operation in operations {
            state.queue.push(operation);
        }
        let sleepers = if refuses { 0 } else { state.idle.min(count) };
        drop(state);
        for _ in 0..sleepers {
            self.shared.work.notify_one();
        }
        if refuses {
            self.shared.refusals.notify_all();
        }
        if closing && self.start_refuser().is_err() {
            // No thread is to be had: the caller's is the last that can keep the promise that
            // every operation completes.
            self.shared.refuse();
        }
    }

    fn expire(&self, now: Instant) {
        let mut state = lock(&self.shared.state);
        state.queue.refuse_expired(now);
        let room = self
            .shared
            .counts
            .replacements_max
            .saturating_sub(state.queue.replaced());
        let replacements = if state.closing {
            0
        } else {
            state.queue.replace_overdue(now, room)
        };
        drop(state);
        self.shared.refusals.notify_all();
        for _ in 0..replacements {
            if self.start_thread().is_ok() {
                self.shared.replaced_threads.fetch_add(1, Ordering::Relaxed);
            } else {
                lock(&self.shared.state).queue.unreplace_one();
            }
        }
    }

    fn is_started(&self, operation: OperationId) -> bool {
        lock(&self.shared.state).queue.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        let now = self.shared.clock.now();
        lock(&self.shared.state).queue.depth(now)
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
        self.shared.poisoned.load(Ordering::Acquire)
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.close();
        let until = self.shared.clock.now().checked_add(timeout);
        let mut state = lock(&self.shared.state);
        while state.alive > 0 || state.refuser_alive {
            let now = self.shared.clock.now();
            let left = until.map_or(timeout, |until| until.saturating_duration_since(now));
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.shared.ended, state, left);
        }
        drop(state);
        for handle in lock(&self.handles).drain(..) {
            // It has counted itself out and is at its last instruction.
            let _ = handle.join();
        }
        true
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}
