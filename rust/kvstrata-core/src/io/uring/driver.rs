//! The ring's thread: starts, answers, completes, sleeps.

use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use hashbrown::HashMap;

use super::flight::{Flight, Step};
use super::ring::{FIRST_TOKEN, Ring};
use super::shared::{Asleep, Shared};
use crate::io::plan::Bounce;
use crate::io::work::{Executed, Work, errno, pause_before};
use crate::io::{Failure, Operation};
use crate::sys::sync::atomic::Ordering;
use crate::sys::sync::{Arc, lock};

/// While so many bytes of bounce buffers are lent, nothing new is started.
const BOUNCE_BYTES_MAX: usize = 64 << 20;

/// Completions of so many bytes are handed out before the ring is looked at again, so that a
/// checksum of many rows leaves no device waiting.
const DELIVERED_BYTES: u64 = 256 << 10;

/// Panics and failed system calls in a row after which the thread gives up.
const PANICS_MAX: u32 = 8;
const FAILURES_MAX: u32 = 500;
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

/// Everything the thread owns. What the kernel has is in `flights`, under the token that its
/// completion will name; no token is used twice.
pub(super) struct Driver {
    shared: Arc<Shared>,
    ring: Ring,
    flights: HashMap<u64, Flight>,
    next_token: u64,
    /// Started, and waiting for a call: the next one, or room for one.
    ready: VecDeque<u64>,
    /// Started, and waiting for a time.
    paused: Vec<(Instant, u64)>,
    /// Answers that were not looked at yet.
    answers: VecDeque<(u64, i32)>,
    /// Ended, and not completed yet.
    ended: VecDeque<(Operation, Executed)>,
    /// Files of the calls that the kernel has, with the number of calls.
    open: HashMap<RawFd, usize>,
    bounce: Bounce,
    bounce_bytes: usize,
    cancelled: usize,
    panics: u32,
    failures: u32,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>, ring: Ring) -> Self {
        Self {
            shared,
            ring,
            flights: HashMap::new(),
            next_token: FIRST_TOKEN,
            ready: VecDeque::new(),
            paused: Vec::new(),
            answers: VecDeque::new(),
            ended: VecDeque::new(),
            open: HashMap::new(),
            bounce: Bounce::default(),
            bounce_bytes: 0,
            cancelled: 0,
            panics: 0,
            failures: 0,
        }
    }

    /// Runs until the engine is closed and everything that was started has completed; whether it
    /// came so far. Otherwise what the kernel has is leaked, for it may still be written to.
    pub(super) fn run(mut self) -> bool {
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn())) {
                Ok(true) => {}
                Ok(false) => {
                    self.shared.ring.store(-1, Ordering::Relaxed);
                    return true;
                }
                Err(_) => {
                    self.panics += 1;
                    self.shared.poison();
                }
            }
            if self.panics > PANICS_MAX || self.failures > FAILURES_MAX {
                self.shared.poison();
                core::mem::forget(self);
                return false;
            }
        }
    }

    /// Looks at what came, starts what can be started, then completes something or sleeps. False
    /// when there will be nothing more to do.
    fn turn(&mut self) -> bool {
        if self.panics > 0 {
            self.fail_what_is_not_lent();
        }
        self.ring.reap(&mut self.answers);
        while let Some((token, answer)) = self.answers.pop_front() {
            self.answer(token, answer);
        }
        self.refill();
        if !self.ended.is_empty() {
            let entered = self.ring.submit();
            self.entered(entered);
            self.deliver();
            return true;
        }
        if self.flights.is_empty() && lock(&self.shared.state).closing {
            return false;
        }
        self.sleep();
        true
    }

    /// After a panic: the operation it befell may be anywhere outside the kernel.
    fn fail_what_is_not_lent(&mut self) {
        let is_free = |(token, flight): (&u64, &Flight)| flight.lent.is_none().then_some(*token);
        let mut tokens: Vec<u64> = self.flights.iter().filter_map(is_free).collect();
        tokens.sort_unstable();
        self.ready.clear();
        self.paused.clear();
        for token in tokens {
            self.end(token, Some(Failure::Poisoned));
        }
    }

    /// Takes the kernel's answer to a call.
    fn answer(&mut self, token: u64, answer: i32) {
        let Some(flight) = self.flights.get_mut(&token) else {
            return;
        };
        let file = flight.lent.take();
        if let Some(file) = &file {
            let fd = file.as_raw_fd();
            match self.open.get_mut(&fd) {
                Some(calls) if *calls > 1 => *calls -= 1,
                _ => drop(self.open.remove(&fd)),
            }
        }
        self.cancelled -= usize::from(flight.cancelled);
        let answer = match &self.shared.alter {
            Some(alter) => alter(&flight.operation, answer),
            None => answer,
        };
        match flight.answer(file, answer) {
            Step::Call(_) => self.ready.push_back(token),
            Step::Pause(retry) => self.pause(token, retry),
            Step::End => self.end(token, None),
        }
    }

    /// Has the ring hold what it is to guard.
    fn guard(&self) {
        let guards = core::mem::take(&mut lock(&self.shared.state).guards);
        if !guards.is_empty() {
            // Refused, the process alone holds the lock, as any other file.
            let _ = self.ring.hold(&guards);
        }
    }

    /// Starts all that there is room for.
    fn refill(&mut self) {
        self.ring.listen();
        self.guard();
        let now = self.shared.clock.now();
        let ready = &mut self.ready;
        self.paused.retain(|(due, token)| {
            let is_due = *due <= now;
            if is_due {
                ready.push_back(*token);
            }
            !is_due
        });
        while let Some(token) = self.ready.front().copied() {
            if !self.launch(token) {
                break;
            }
            self.ready.pop_front();
        }
        self.cancel_overdue();
        while self.has_room()
            && let Some(operation) = self.shared.next_operation()
        {
            let token = self.next_token;
            self.next_token += 1;
            let late = operation.deadline <= now;
            self.flights.insert(token, Flight::new(operation));
            if late {
                self.end(token, Some(Failure::TimedOut));
            } else if !self.launch(token) {
                self.ready.push_back(token);
            }
        }
    }

    /// Whether another operation may be started. Overdue ones make room for as many others.
    fn has_room(&self) -> bool {
        let depth = self.shared.depth;
        self.ready.is_empty()
            && self.flights.len() < depth + self.cancelled.min(depth)
            && self.bounce_bytes < BOUNCE_BYTES_MAX
    }

    /// Hands the next call of an operation to the kernel; false when that has to wait until
    /// another one returns.
    fn launch(&mut self, token: u64) -> bool {
        let Some(flight) = self.flights.get_mut(&token) else {
            return true;
        };
        let held = |flight: &Flight| flight.work.as_ref().map_or(0, Work::bounce_bytes);
        let held_before = held(flight);
        let step = flight.step(&self.shared.mode, &self.shared.files, &mut self.bounce);
        self.bounce_bytes += held(flight) - held_before;
        let file = match step {
            Step::Call(file) => file,
            Step::Pause(retry) => {
                self.pause(token, retry);
                return true;
            }
            Step::End => {
                self.end(token, None);
                return true;
            }
        };
        let fd = file.as_raw_fd();
        if !self.open.contains_key(&fd) && self.open.len() >= self.shared.files_max {
            return false;
        }
        let Some(work) = &flight.work else {
            return true;
        };
        let file = flight.lent.insert(file);
        #[expect(unsafe_code, reason = "the kernel gets the operation's memory")]
        // SAFETY: the flight owns transfer, bounce buffer, handles of all memory and the file. It
        // stays in `flights`, unchanged but for flags, until `answer` gets this token from
        // `reap`: `end` is not called for what is lent, and a driver that stops early is leaked.
        let pushed = unsafe { self.ring.push_transfer(token, file, &work.transfer) };
        if pushed {
            *self.open.entry(fd).or_default() += 1;
        } else {
            flight.lent = None;
        }
        pushed
    }

    /// Lets an operation wait before its next call, or fails it when it is too late for that.
    fn pause(&mut self, token: u64, retry: u32) {
        let Some(flight) = self.flights.get(&token) else {
            return;
        };
        let now = self.shared.clock.now();
        match now.checked_add(pause_before(retry)) {
            Some(due) if now < flight.operation.deadline => self.paused.push((due, token)),
            _ => self.end(token, Some(Failure::Os(libc::EAGAIN))),
        }
    }

    /// Ends an operation of which the kernel has nothing.
    fn end(&mut self, token: u64, failure: Option<Failure>) {
        let Some(flight) = self.flights.get_mut(&token) else {
            return;
        };
        if let Some(failure) = failure {
            flight.fail(failure);
        }
        let held = flight.work.as_ref().map_or(0, Work::bounce_bytes);
        self.bounce_bytes = self.bounce_bytes.saturating_sub(held);
        let executed = flight.finish(&self.shared.mode, &mut self.bounce);
        if let Some(flight) = self.flights.remove(&token) {
            self.ended.push_back((flight.operation, executed));
        }
    }

    /// Asks the kernel to give back what is past its deadline.
    fn cancel_overdue(&mut self) {
        let Some(now) = lock(&self.shared.state).overdue.take() else {
            return;
        };
        for (token, flight) in &mut self.flights {
            let is_overdue = flight.operation.deadline <= now && flight.lent.is_some();
            if is_overdue && !flight.cancelled && self.ring.push_cancel(*token) {
                flight.cancelled = true;
                self.cancelled += 1;
            }
        }
    }

    /// Completes what has ended, a little of it.
    fn deliver(&mut self) {
        let mut bytes = 0_u64;
        while bytes < DELIVERED_BYTES
            && let Some((operation, executed)) = self.ended.pop_front()
        {
            bytes = bytes.saturating_add(executed.transferred_bytes);
            lock(&self.shared.state).queue.end(operation.id);
            self.shared.complete(operation, executed);
        }
    }

    /// Sleeps until the kernel has returned something, somebody wakes the thread, or a pause is
    /// over.
    fn sleep(&mut self) {
        let has_room = self.has_room();
        let mut state = lock(&self.shared.state);
        let refuses = state.closing || self.shared.poisoned.load(Ordering::Acquire);
        let can_start = has_room && !refuses && state.queue.is_waiting();
        if can_start || state.overdue.is_some() || (state.closing && self.flights.is_empty()) {
            return;
        }
        state.asleep = if has_room {
            Asleep::UntilWork
        } else {
            Asleep::Full
        };
        drop(state);
        let due = self.paused.iter().map(|(due, _)| *due).min();
        let now = self.shared.clock.now();
        let entered = self
            .ring
            .wait(due.map(|due| due.saturating_duration_since(now)));
        lock(&self.shared.state).asleep = Asleep::No;
        self.entered(entered);
    }

    /// Counts system calls that fail although nothing is wrong with what they were given.
    fn entered(&mut self, entered: std::io::Result<()>) {
        let Err(error) = entered else {
            self.failures = 0;
            return;
        };
        if !matches!(errno(&error), libc::EINTR | libc::EBUSY) {
            self.failures += 1;
            self.shared.clock.sleep(FAILURE_PAUSE);
        }
    }
}
