//! What waits and what is under way, without threads: the order of operations.

use std::collections::VecDeque;
use std::time::Instant;

use hashbrown::HashMap;

use super::{Direction, Failure, Operation, OperationId, QueueDepth};

/// While writes wait, one goes after this many reads.
pub(super) const READS_PER_WRITE: u32 = 10;

#[derive(Debug)]
struct Started {
    deadline: Instant,
    replaced: bool,
}

/// The queue of an engine.
#[derive(Debug, Default)]
pub(super) struct Queue {
    reads: VecDeque<Operation>,
    writes: VecDeque<Operation>,
    reads_since_write: u32,
    started: HashMap<OperationId, Started>,
    /// To be completed without having been started.
    refused: Vec<(Operation, Failure)>,
}

impl Queue {
    /// Adds an operation.
    pub(super) fn push(&mut self, operation: Operation) {
        match operation.direction {
            Direction::Read => self.reads.push_back(operation),
            Direction::Write => self.writes.push_back(operation),
        }
    }

    /// Takes the operation whose turn it is and notes it as started.
    pub(super) fn start(&mut self) -> Option<Operation> {
        let operation = self.next()?;
        let started = Started {
            deadline: operation.deadline,
            replaced: false,
        };
        self.started.insert(operation.id, started);
        Some(operation)
    }

    /// Takes the operation whose turn it is, not to be started.
    pub(super) fn next(&mut self) -> Option<Operation> {
        let write_is_due = self.reads_since_write >= READS_PER_WRITE || self.reads.is_empty();
        if write_is_due && let Some(write) = self.writes.pop_front() {
            self.reads_since_write = 0;
            return Some(write);
        }
        let read = self.reads.pop_front()?;
        self.reads_since_write = self.reads_since_write.saturating_add(1);
        if self.writes.is_empty() {
            self.reads_since_write = 0;
        }
        Some(read)
    }

    /// Notes that a started operation has ended; whether a thread took its thread's place.
    pub(super) fn end(&mut self, operation: OperationId) -> bool {
        self.started
            .remove(&operation)
            .is_some_and(|started| started.replaced)
    }

    /// Refuses all operations that were not started by their deadline.
    pub(super) fn refuse_expired(&mut self, now: Instant) {
        for queue in [&mut self.reads, &mut self.writes] {
            if queue.iter().any(|operation| operation.deadline <= now) {
                let (late, kept) = queue
                    .drain(..)
                    .partition::<Vec<_>, _>(|operation| operation.deadline <= now);
                queue.extend(kept);
                let late = late.into_iter();
                self.refused
                    .extend(late.map(|operation| (operation, Failure::TimedOut)));
            }
        }
    }

    /// The next operation to complete without starting it; in an engine that is closing or
    /// poisoned that is every one.
    pub(super) fn next_refusal(
        &mut self,
        closing: bool,
        poisoned: bool,
    ) -> Option<(Operation, Failure)> {
        if let Some(refusal) = self.refused.pop() {
            return Some(refusal);
        }
        let failure = match (closing, poisoned) {
            (true, _) => Failure::Closed,
            (false, true) => Failure::Poisoned,
            (false, false) => return None,
        };
        self.next().map(|operation| (operation, failure))
    }

    /// Whether an operation waits for its turn.
    pub(super) fn is_waiting(&self) -> bool {
        !(self.reads.is_empty() && self.writes.is_empty())
    }

    /// Marks up to `count` overdue operations as replaced; the number that was marked.
    pub(super) fn replace_overdue(&mut self, now: Instant, count: usize) -> usize {
        let overdue = self
            .started
            .values_mut()
            .filter(|started| started.deadline <= now && !started.replaced)
            .take(count);
        overdue.map(|started| started.replaced = true).count()
    }

    /// Takes back a mark of [`Queue::replace_overdue`], whose thread could not be started.
    pub(super) fn unreplace_one(&mut self) {
        if let Some(started) = self.started.values_mut().find(|started| started.replaced) {
            started.replaced = false;
        }
    }

    /// Operations whose thread was replaced.
    pub(super) fn replaced(&self) -> usize {
        self.started
            .values()
            .filter(|started| started.replaced)
            .count()
    }

    /// Whether an operation was started and has not ended.
    pub(super) fn is_started(&self, operation: OperationId) -> bool {
        self.started.contains_key(&operation)
    }

    /// What waits and what is under way.
    pub(super) fn depth(&self, now: Instant) -> QueueDepth {
        QueueDepth {
            queued_reads: self.reads.len(),
            queued_writes: self.writes.len(),
            in_flight: self.started.len(),
            stuck: self
                .started
                .values()
                .filter(|started| started.deadline <= now)
                .count(),
        }
    }
}
