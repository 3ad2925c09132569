//! The body of a thread that executes, and what the threads share.

use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::ThreadCounts;
use super::executor::{Bounce, Executed, Executor};
use crate::io::intake::Intake;
use crate::io::{Failure, Operation};
use crate::sys::sync::atomic::AtomicU64;
use crate::sys::sync::{Arc, Condvar, wait};

/// Number of threads that sleep.
#[derive(Debug, Default)]
pub(super) struct Idle(pub(super) usize);

pub(super) struct Shared {
    pub(super) intake: Arc<Intake<Idle>>,
    /// Operations can be started, or the engine closes.
    pub(super) work: Condvar,
    pub(super) executor: Arc<dyn Executor>,
    pub(super) counts: ThreadCounts,
    pub(super) replaced_threads: AtomicU64,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("intake", &self.intake)
            .field("executor", &self.executor)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Executes until the engine closes or another thread has taken this one's place.
    pub(super) fn work(&self) {
        let mut bounce = Bounce::default();
        while let Some(mut operation) = self.next_operation() {
            let now = self.intake.clock().now();
            let executed = if operation.deadline <= now {
                Executed::refused(Failure::TimedOut)
            } else {
                self.execute(&mut operation, now, &mut bounce)
            };
            let mut state = self.intake.lock();
            let was_replaced = state.queue.end(operation.id);
            // Its file has room again, and this thread will not be there to use it.
            let hands_over = was_replaced && state.queue.can_start();
            drop(state);
            if hands_over {
                self.work.notify_one();
            }
            self.intake.complete(operation, executed);
            if was_replaced {
                break;
            }
        }
        self.intake.end_thread();
    }

    /// Sleeps until there is an operation to start; None when the engine closes.
    fn next_operation(&self) -> Option<Operation> {
        let mut state = self.intake.lock();
        loop {
            if state.closing {
                return None;
            }
            if !self.intake.poisoned()
                && let Some(operation) = state.queue.start()
            {
                return Some(operation);
            }
            state.own.0 += 1;
            state = wait(&self.work, state);
            state.own.0 -= 1;
        }
    }

    fn execute(&self, operation: &mut Operation, now: Instant, bounce: &mut Bounce) -> Executed {
        let body = AssertUnwindSafe(|| {
            operation.begin(now);
            self.executor.execute(operation, bounce)
        });
        catch_unwind(body).unwrap_or_else(|_| {
            self.intake.poison();
            Executed::refused(Failure::Poisoned)
        })
    }
}
