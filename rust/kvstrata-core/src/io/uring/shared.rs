//! What the engine's threads and its callers share.

use core::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use rustix::process::Pid;

use super::Alter;
use super::ring::Wake;
use crate::io::file::FileCache;
use crate::io::queue::Queue;
use crate::io::work::{Executed, Mode};
use crate::io::{Completion, CompletionSink, Operation};
use crate::sys::clock::Clock;
use crate::sys::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use crate::sys::sync::{Arc, Condvar, Mutex, lock, wait};

/// What the ring's thread is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Asleep {
    #[default]
    No,
    /// It has nothing to do.
    UntilWork,
    /// It can start nothing before something returns.
    Full,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) queue: Queue,
    /// What is past its deadline at this time is to be cancelled.
    pub(super) overdue: Option<Instant>,
    /// To be kept open by the ring.
    pub(super) guards: Vec<OwnedFd>,
    pub(super) asleep: Asleep,
    pub(super) ring_alive: bool,
    pub(super) refuser_alive: bool,
    pub(super) closing: bool,
}

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Operations were refused, or the engine closes or is poisoned.
    pub(super) refusals: Condvar,
    /// A thread has ended.
    pub(super) ended: Condvar,
    pub(super) wake: Arc<Wake>,
    pub(super) files: Arc<FileCache>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) sink: CompletionSink,
    pub(super) mode: Mode,
    pub(super) depth: usize,
    /// Most files that the kernel has calls on.
    pub(super) files_max: usize,
    pub(super) alter: Option<Alter>,
    pub(super) poisoned: AtomicBool,
    /// The ring's descriptor, -1 while there is none.
    pub(super) ring: AtomicI32,
    /// The process that has the threads.
    pub(super) process: Pid,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("mode", &self.mode)
            .field("depth", &self.depth)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The next operation to start, for the ring's thread.
    pub(super) fn next_operation(&self) -> Option<Operation> {
        let mut state = lock(&self.state);
        if state.closing || self.poisoned.load(Ordering::Acquire) {
            return None;
        }
        state.queue.start()
    }

    /// The body of the thread that completes what is not to be started.
    pub(super) fn refuse(&self) {
        let mut state = lock(&self.state);
        loop {
            let (closing, poisoned) = (state.closing, self.poisoned.load(Ordering::Acquire));
            if let Some((operation, failure)) = state.queue.next_refusal(closing, poisoned) {
                drop(state);
                let executed = Executed {
                    transferred_bytes: 0,
                    result: Err(failure),
                };
                self.complete(operation, executed);
                state = lock(&self.state);
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

    pub(super) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        // Taking the lock once orders this before the refuser's next look at the flag.
        drop(lock(&self.state));
        self.refusals.notify_all();
    }
}
