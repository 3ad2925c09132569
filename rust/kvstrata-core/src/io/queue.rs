//! What waits and what is under way, without threads: the order of operations.
//!
//! A file has its own lane. One that has as many operations under way as one file may is passed
//! over until one of them ends, so that a file that hangs does not hold up the others.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use hashbrown::HashMap;

use super::{Direction, Failure, Operation, OperationId, QueueDepth};
use crate::sys::sync::Arc;

/// While writes wait, one goes after this many reads.
pub(super) const READS_PER_WRITE: u32 = 10;

/// A file, for as long as an operation of it is here: its address.
type FileKey = usize;

#[derive(Debug)]
struct Started {
    file: FileKey,
    deadline: Instant,
    replaced: bool,
    /// The kernel has nothing of it any more: another one of its file may be started.
    made_room: bool,
}

/// The operations of one file, each with its place in the order of submission.
#[derive(Debug, Default)]
struct Lane {
    reads: VecDeque<(u64, Operation)>,
    writes: VecDeque<(u64, Operation)>,
    started: usize,
}

impl Lane {
    const fn waiting(&mut self, direction: Direction) -> &mut VecDeque<(u64, Operation)> {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }

    fn is_over(&self) -> bool {
        self.started == 0 && self.reads.is_empty() && self.writes.is_empty()
    }
}

/// The lanes that may start an operation, by the place of their first one.
#[derive(Debug, Default)]
struct Heads {
    reads: BTreeMap<u64, FileKey>,
    writes: BTreeMap<u64, FileKey>,
}

impl Heads {
    const fn of(&mut self, direction: Direction) -> &mut BTreeMap<u64, FileKey> {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }
}

/// The queue of an engine.
#[derive(Debug)]
pub(super) struct Queue {
    lanes: HashMap<FileKey, Lane>,
    heads: Heads,
    /// Most operations of one file under way.
    per_file: usize,
    next_place: u64,
    queued_reads: usize,
    queued_writes: usize,
    reads_since_write: u32,
    started: HashMap<OperationId, Started>,
    /// To be completed without having been started.
    refused: VecDeque<(Operation, Failure)>,
}

impl Queue {
    /// An empty queue that starts at most `per_file` operations of one file at a time.
    pub(super) fn new(per_file: usize) -> Self {
        Self {
            lanes: HashMap::new(),
            heads: Heads::default(),
            per_file: per_file.max(1),
            next_place: 0,
            queued_reads: 0,
            queued_writes: 0,
            reads_since_write: 0,
            started: HashMap::new(),
            refused: VecDeque::new(),
        }
    }

    /// Lets at most `per_file` operations of one file be started at a time, from the next one on.
    pub(super) fn limit_per_file(&mut self, per_file: usize) {
        self.per_file = per_file.max(1);
    }

    /// Adds an operation.
    pub(super) fn push(&mut self, operation: Operation) {
        let (file, direction) = (key(&operation), operation.direction);
        let place = self.next_place;
        self.next_place += 1;
        *self.queued(direction) += 1;
        let lane = self.lanes.entry(file).or_default();
        lane.waiting(direction).push_back((place, operation));
        if lane.started < self.per_file && lane.waiting(direction).len() == 1 {
            self.heads.of(direction).insert(place, file);
        }
    }

    /// Takes the operation whose turn it is and notes it as started.
    pub(super) fn start(&mut self) -> Option<Operation> {
        let write_is_due = self.reads_since_write >= READS_PER_WRITE || self.heads.reads.is_empty();
        if write_is_due && let Some(write) = self.start_first(Direction::Write) {
            self.reads_since_write = 0;
            return Some(write);
        }
        let read = self.start_first(Direction::Read)?;
        self.reads_since_write = self.reads_since_write.saturating_add(1);
        if self.queued_writes == 0 {
            self.reads_since_write = 0;
        }
        Some(read)
    }

    /// Starts the first operation of a direction whose file has room.
    fn start_first(&mut self, direction: Direction) -> Option<Operation> {
        let (_, file) = self.heads.of(direction).pop_first()?;
        let lane = self.lanes.get_mut(&file)?;
        let (_, operation) = lane.waiting(direction).pop_front()?;
        lane.started += 1;
        *self.queued(direction) -= 1;
        let started = Started {
            file,
            deadline: operation.deadline,
            replaced: false,
            made_room: false,
        };
        self.started.insert(operation.id, started);
        self.offer(file);
        Some(operation)
    }

    /// Notes that the kernel has nothing of a started operation any more, which is yet to end.
    pub(super) fn make_room(&mut self, operation: OperationId) {
        if let Some(started) = self.started.get_mut(&operation)
            && !core::mem::replace(&mut started.made_room, true)
        {
            let file = started.file;
            self.leave(file);
        }
    }

    /// Notes that a started operation has ended; whether a thread took its thread's place.
    pub(super) fn end(&mut self, operation: OperationId) -> bool {
        let Some(started) = self.started.remove(&operation) else {
            return false;
        };
        if !started.made_room {
            self.leave(started.file);
        }
        started.replaced
    }

    /// Another operation of the file may be started.
    fn leave(&mut self, file: FileKey) {
        let Some(lane) = self.lanes.get_mut(&file) else {
            return;
        };
        lane.started = lane.started.saturating_sub(1);
        if lane.is_over() {
            self.lanes.remove(&file);
        } else {
            self.offer(file);
        }
    }

    /// Enters the first operations of a file among those that may be started, if it has room, or
    /// takes them out.
    fn offer(&mut self, file: FileKey) {
        let Some(lane) = self.lanes.get_mut(&file) else {
            return;
        };
        let has_room = lane.started < self.per_file;
        for direction in [Direction::Read, Direction::Write] {
            if let Some((place, _)) = lane.waiting(direction).front() {
                if has_room {
                    self.heads.of(direction).insert(*place, file);
                } else {
                    self.heads.of(direction).remove(place);
                }
            }
        }
    }

    /// Refuses all operations that were not started by their deadline.
    pub(super) fn refuse_expired(&mut self, now: Instant) {
        self.refuse(Failure::TimedOut, |operation| operation.deadline <= now);
    }

    fn refuse(&mut self, failure: Failure, is_it: impl Fn(&Operation) -> bool) {
        let mut refused = Vec::new();
        for direction in [Direction::Read, Direction::Write] {
            for lane in self.lanes.values_mut() {
                let waiting = lane.waiting(direction);
                if waiting.iter().any(|(_, operation)| is_it(operation)) {
                    let (out, kept) = waiting
                        .drain(..)
                        .partition::<Vec<_>, _>(|(_, operation)| is_it(operation));
                    waiting.extend(kept);
                    refused.extend(out);
                }
            }
        }
        if refused.is_empty() {
            return;
        }
        refused.sort_unstable_by_key(|(place, _)| *place);
        for (_, operation) in refused {
            *self.queued(operation.direction) -= 1;
            self.refused.push_back((operation, failure));
        }
        self.lanes.retain(|_, lane| !lane.is_over());
        self.heads = Heads::default();
        let files: Vec<FileKey> = self.lanes.keys().copied().collect();
        for file in files {
            self.offer(file);
        }
    }

    /// The next operation to complete without starting it; in an engine that is closing or
    /// poisoned that is every one.
    pub(super) fn next_refusal(
        &mut self,
        closing: bool,
        poisoned: bool,
    ) -> Option<(Operation, Failure)> {
        match (closing, poisoned) {
            (true, _) => self.refuse(Failure::Closed, |_| true),
            (false, true) => self.refuse(Failure::Poisoned, |_| true),
            (false, false) => {}
        }
        self.refused.pop_front()
    }

    /// Takes everything that waits, in the order of submission.
    pub(super) fn take_waiting(&mut self) -> Vec<Operation> {
        let refused_before = self.refused.len();
        self.refuse(Failure::Closed, |_| true);
        let taken = self.refused.drain(refused_before..);
        taken.map(|(operation, _)| operation).collect()
    }

    /// Whether an operation may be started.
    pub(super) fn can_start(&self) -> bool {
        !(self.heads.reads.is_empty() && self.heads.writes.is_empty())
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
            queued_reads: self.queued_reads,
            queued_writes: self.queued_writes,
            in_flight: self.started.len(),
            stuck: self
                .started
                .values()
                .filter(|started| started.deadline <= now)
                .count(),
        }
    }

    const fn queued(&mut self, direction: Direction) -> &mut usize {
        match direction {
            Direction::Read => &mut self.queued_reads,
            Direction::Write => &mut self.queued_writes,
        }
    }
}

fn key(operation: &Operation) -> FileKey {
    Arc::as_ptr(&operation.file).addr()
}
