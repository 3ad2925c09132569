//! The way of operations into an engine and out of it again: one lock, one refuser.
//!
//! Operations that are not to be started (too late, closed, poisoned) are completed by a thread of
//! their own, so that they end even while every other thread hangs.

use core::fmt;
use core::time::Duration;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::queue::Queue;
use super::work::Executed;
use super::{Completion, CompletionSink, Engine, Failure, Operation, OperationId, QueueDepth};
use crate::sys::clock::Clock;
use crate::sys::sync::atomic::{AtomicBool, Ordering};
use crate::sys::sync::{
    Arc, Condvar, JoinHandle, Mutex, MutexGuard, lock, spawn, wait, wait_timeout,
};

/// What an engine knows of its operations and threads; `own` is the engine's own part.
#[derive(Debug)]
pub(super) struct Intaken<S> {
    pub(super) queue: Queue,
    pub(super) closing: bool,
    /// Threads that execute and have not ended.
    pub(super) alive: usize,
    pub(super) own: S,
    /// The engine that has taken over: it gets everything from now on.
    pub(super) successor: Option<Arc<dyn Engine>>,
    refuser_alive: bool,
}

/// The intake of an engine.
pub(super) struct Intake<S> {
    state: Mutex<Intaken<S>>,
    /// Operations were refused, or the engine closes or is poisoned.
    refusals: Condvar,
    /// A thread has ended.
    ended: Condvar,
    sink: CompletionSink,
    clock: Arc<dyn Clock>,
    poisoned: AtomicBool,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl<S> fmt::Debug for Intake<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Intake")
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl<S: Send + 'static> Intake<S> {
    /// An intake without threads; at most `per_file` operations of one file are started.
    pub(super) fn new(
        per_file: usize,
        own: S,
        clock: Arc<dyn Clock>,
        sink: CompletionSink,
    ) -> Self {
        Self {
            state: Mutex::new(Intaken {
                queue: Queue::new(per_file),
                closing: false,
                alive: 0,
                own,
                successor: None,
                refuser_alive: false,
            }),
            refusals: Condvar::new(),
            ended: Condvar::new(),
            sink,
            clock,
            poisoned: AtomicBool::new(false),
            handles: Mutex::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Intaken<S>> {
        lock(&self.state)
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Starts a thread that is joined by [`Intake::wait_for_end`].
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let handle = spawn(name, body)?;
        let mut handles = lock(&self.handles);
        handles.retain(|handle| !handle.is_finished());
        handles.push(handle);
        Ok(())
    }

    /// Starts the thread that completes what is refused, unless it is there.
    ///
    /// # Errors
    /// The operating system's.
    pub(super) fn start_refuser(self: &Arc<Self>) -> io::Result<()> {
        if core::mem::replace(&mut self.lock().refuser_alive, true) {
            return Ok(());
        }
        let intake = Arc::clone(self);
        let started = self.spawn("kvstrata-refuse", move || intake.refuse());
        if started.is_err() {
            self.lock().refuser_alive = false;
        }
        started
    }

    /// Takes operations. `rouse` says, under the lock, what the engine has to wake; it is not
    /// asked when nothing will be started any more.
    pub(super) fn submit<W>(
        self: &Arc<Self>,
        operations: Vec<Operation>,
        rouse: impl FnOnce(&mut Intaken<S>) -> W,
    ) -> Option<W> {
        let mut state = self.lock();
        if let Some(successor) = state.successor.clone() {
            drop(state);
            successor.submit(operations);
            return None;
        }
        let closing = state.closing;
        let refuses = closing || self.poisoned();
        for operation in operations {
            state.queue.push(operation);
        }
        if !refuses {
            return Some(rouse(&mut state));
        }
        drop(state);
        self.refusals.notify_all();
        if closing && self.start_refuser().is_err() {
            // No thread is to be had: the caller's is the last that can keep the promise that
            // every operation completes.
            self.refuse();
        }
        None
    }

    /// Ends what was not started by its deadline; `rouse` as in [`Intake::submit`].
    pub(super) fn expire<W>(&self, now: Instant, rouse: impl FnOnce(&mut Intaken<S>) -> W) -> W {
        let mut state = self.lock();
        state.queue.refuse_expired(now);
        let roused = rouse(&mut state);
        let successor = state.successor.clone();
        drop(state);
        self.refusals.notify_all();
        if let Some(successor) = successor {
            successor.expire(now);
        }
        roused
    }

    /// Completes an operation.
    pub(super) fn complete(&self, operation: Operation, executed: Executed) {
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

    /// The body of the thread that completes what is not to be started.
    fn refuse(&self) {
        let mut state = self.lock();
        loop {
            let (closing, poisoned) = (state.closing, self.poisoned());
            if let Some((operation, failure)) = state.queue.next_refusal(closing, poisoned) {
                drop(state);
                self.complete(operation, Executed::refused(failure));
                state = self.lock();
            } else if closing {
                state.refuser_alive = false;
                break;
            } else {
                state = wait(&self.refusals, state);
            }
        }
        drop(state);
        self.ended.notify_all();
    }

    /// From now on every operation fails.
    pub(super) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        // Taking the lock once orders this before the refuser's next look at the flag.
        drop(self.lock());
        self.refusals.notify_all();
    }

    /// See [`Engine::poisoned`].
    pub(super) fn poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// The engine that has taken over.
    pub(super) fn successor(&self) -> Option<Arc<dyn Engine>> {
        self.lock().successor.clone()
    }

    /// See [`Engine::is_started`].
    pub(super) fn is_started(&self, operation: OperationId) -> bool {
        let state = self.lock();
        let is_started = state.queue.is_started(operation);
        let successor = state.successor.clone();
        drop(state);
        is_started || successor.is_some_and(|successor| successor.is_started(operation))
    }

    /// See [`Engine::queue`].
    pub(super) fn depth(&self) -> QueueDepth {
        let now = self.clock.now();
        let state = self.lock();
        let own = state.queue.depth(now);
        let successor = state.successor.clone();
        drop(state);
        let other = successor.map_or_else(QueueDepth::default, |successor| successor.queue());
        QueueDepth {
            queued_reads: own.queued_reads + other.queued_reads,
            queued_writes: own.queued_writes + other.queued_writes,
            in_flight: own.in_flight + other.in_flight,
            stuck: own.stuck + other.stuck,
        }
    }

    /// Stops admission. The engine wakes its own threads.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.refusals.notify_all();
    }

    /// Notes that a thread that executes has ended.
    pub(super) fn end_thread(&self) {
        self.lock().alive -= 1;
        self.ended.notify_all();
    }

    /// Waits until a closed engine's threads have ended, `timeout` long at most.
    pub(super) fn wait_for_end(&self, timeout: Duration) -> bool {
        let until = self.clock.now().checked_add(timeout);
        let mut state = self.lock();
        while state.alive > 0 || state.refuser_alive {
            let now = self.clock.now();
            let left = until.map_or(timeout, |until| until.saturating_duration_since(now));
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.ended, state, left);
        }
        let successor = state.successor.clone();
        drop(state);
        for handle in lock(&self.handles).drain(..) {
            // It has counted itself out and is at its last instruction.
            let _ = handle.join();
        }
        let left = until.map_or(timeout, |until| {
            until.saturating_duration_since(self.clock.now())
        });
        successor.is_none_or(|successor| successor.shutdown(left))
    }
}

impl Executed {
    /// The end of an operation that was not started.
    pub(super) const fn refused(failure: Failure) -> Self {
        Self {
            transferred_bytes: 0,
            result: Err(failure),
        }
    }
}
