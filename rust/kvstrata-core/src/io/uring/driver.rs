//! The ring's thread: starts, answers, completes, sleeps.

use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use hashbrown::HashMap;

use super::errands::OpenKey;
use super::flight::{Flight, Step};
use super::ring::{FIRST_TOKEN, Ring};
use super::shared::{Asleep, Shared};
use super::waits::Waits;
use crate::io::plan::Bounce;
use crate::io::settle::before_read;
use crate::io::work::{Executed, Work, errno, pause_before};
use crate::io::{Failure, Operation};
use crate::sys::fs::File;
use crate::sys::sync::Arc;
use crate::sys::sync::atomic::Ordering;

/// While so many bytes of bounce buffers are lent, nothing new is started.
const BOUNCE_BYTES_MAX: usize = 64 << 20;

/// Operations of so many bytes are begun, and completions of so many handed out, before the ring is
/// looked at again, so that a checksum of many rows leaves no device waiting.
const TURN_BYTES: u64 = 256 << 10;

/// Panics in a row after which the thread gives up.
const PANICS_MAX: u32 = 8;
/// System calls in a row that may fail for a passing reason, and for good.
const FAILURES_MAX: u32 = 100;
const REFUSALS_MAX: u32 = 3;
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

/// Everything the thread owns. What the kernel has is in `flights`, under the token that its
/// completion will name; no token is used twice.
pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) ring: Ring,
    pub(super) flights: HashMap<u64, Flight>,
    next_token: u64,
    /// Started, and waiting for a call: the next one, or room for one.
    pub(super) ready: VecDeque<u64>,
    pub(super) waits: Waits,
    /// Answers that were not looked at yet.
    pub(super) answers: VecDeque<(u64, i32)>,
    /// Ended, and not completed yet.
    ended: VecDeque<(Operation, Executed)>,
    /// Files of the calls that the kernel has, with the number of calls.
    pub(super) open: HashMap<RawFd, usize>,
    /// Files that other threads look at, with the operations that wait for it.
    pub(super) looked_at: HashMap<OpenKey, Vec<u64>>,
    bounce: Bounce,
    bounce_bytes: usize,
    pub(super) cancelled: usize,
    panics: u32,
    failures: u32,
    refusals: u32,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>, ring: Ring) -> Self {
        Self {
            shared,
            ring,
            flights: HashMap::new(),
            next_token: FIRST_TOKEN,
            ready: VecDeque::new(),
            waits: Waits::default(),
            answers: VecDeque::new(),
            ended: VecDeque::new(),
            open: HashMap::new(),
            looked_at: HashMap::new(),
            bounce: Bounce::default(),
            bounce_bytes: 0,
            cancelled: 0,
            panics: 0,
            failures: 0,
            refusals: 0,
        }
    }

    /// Runs until the engine is closed and everything that was started has completed, or another
    /// engine has taken over; whether it came so far. Otherwise what the kernel has is leaked, for
    /// it may still be written to.
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
                    self.shared.intake.poison();
                }
            }
            if self.failures > FAILURES_MAX || self.refusals > REFUSALS_MAX {
                self.shared.ring.store(-1, Ordering::Relaxed);
                let make = self.shared.heir.clone();
                let make = make.filter(|_| !self.shared.intake.poisoned());
                let heir = make.and_then(|make| make(self.shared.mode.now()).ok());
                return self.hand_over(heir);
            }
            if self.panics > PANICS_MAX {
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
        self.reap();
        self.refill();
        if !self.ended.is_empty() {
            let entered = self.ring.submit();
            self.entered(entered);
            self.deliver();
            return true;
        }
        if self.flights.is_empty() && self.shared.intake.lock().closing {
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
        self.waits.end_pauses();
        for token in tokens {
            self.end(token, Some(Failure::Poisoned));
        }
    }

    /// Has the ring hold what it is to guard.
    fn guard(&self) {
        let guards = core::mem::take(&mut self.shared.intake.lock().own.guards);
        if !guards.is_empty() {
            // Refused, the process alone holds the lock, as any other file.
            let _ = self.ring.hold(&guards);
        }
    }

    /// Starts all that there is room for.
    fn refill(&mut self) {
        self.ring.listen();
        self.guard();
        let now = self.shared.intake.clock().now();
        self.take_looks();
        self.ready.extend(self.waits.rested(now));
        while let Some(token) = self.ready.front().copied() {
            if !self.launch(token) {
                break;
            }
            self.ready.pop_front();
        }
        self.cancel_overdue();
        let mut begun_bytes = 0_u64;
        while self.has_room()
            && begun_bytes < TURN_BYTES
            && let Some(operation) = self.shared.next_operation()
        {
            if operation.has_prelude() && operation.bytes() >= TURN_BYTES {
                // The device has what was begun before meanwhile.
                let entered = self.ring.submit();
                self.entered(entered);
            }
            begun_bytes = begun_bytes.saturating_add(self.begin(operation, now));
        }
        if begun_bytes > 0 {
            let entered = self.ring.submit();
            self.entered(entered);
        }
    }

    /// Starts an operation, unless it is too late; returns the bytes whose prelude was done.
    fn begin(&mut self, operation: Operation, now: Instant) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let late = operation.deadline <= now;
        // In its place before its prelude, which may panic.
        let flight = self.flights.entry(token).insert(Flight::new(operation));
        let operation = &mut flight.into_mut().operation;
        if late {
            self.end(token, Some(Failure::TimedOut));
            return 0;
        }
        let has_prelude = operation.begin(now);
        let bytes = operation.bytes();
        if !self.launch(token) {
            self.ready.push_back(token);
        }
        if has_prelude { bytes } else { 0 }
    }

    /// Whether another operation may be started. Overdue ones make room for as many others.
    fn has_room(&self) -> bool {
        let depth = self.shared.depth_in_all();
        self.ready.is_empty()
            && self.flights.len() < depth + self.cancelled.min(depth)
            && self.bounce_bytes < BOUNCE_BYTES_MAX
            && !(self.shared.mode.settles() && self.shared.errands.is_full())
    }

    /// Hands the next call of an operation to the kernel; false when that has to wait until
    /// another one returns.
    fn launch(&mut self, token: u64) -> bool {
        let Some(flight) = self.flights.get_mut(&token) else {
            return true;
        };
        let held = |flight: &Flight| flight.work.as_ref().map_or(0, Work::bounce_bytes);
        let held_before = held(flight);
        let step = flight.step(&self.shared, &mut self.bounce);
        self.bounce_bytes += held(flight) - held_before;
        match step {
            Step::Call(file) => return self.call(token, file),
            Step::Look(direct) => return self.look(token, direct),
            Step::Pause(retry) => self.pause(token, retry),
            Step::End => self.end(token, None),
        }
        true
    }

    /// Hands the kernel a call on `file`; false when there is no room for it.
    fn call(&mut self, token: u64, file: Arc<File>) -> bool {
        let fd = file.as_raw_fd();
        let files = self.open.len() + self.looked_at.len();
        if !self.open.contains_key(&fd) && files >= self.shared.files_max {
            self.release(Some(file));
            return false;
        }
        let Some(flight) = self.flights.get_mut(&token) else {
            return true;
        };
        let Some(transfer) = flight.work.as_ref().map(|work| &work.transfer) else {
            return true;
        };
        if self.shared.mode.settles() {
            before_read(&flight.operation, transfer.direct(), &file);
        }
        let file = flight.lent.insert(file);
        #[expect(unsafe_code, reason = "the kernel gets the operation's memory")]
        // SAFETY: the flight owns transfer, bounce buffer, handles of all memory and the file. It
        // stays in `flights`, unchanged but for flags, until `answer` gets this token from
        // `reap`: `end` is not called for what is lent, and a driver that stops early is leaked or
        // has handed over only what the kernel has not taken.
        let pushed = unsafe { self.ring.push_transfer(token, file, transfer) };
        if pushed {
            *self.open.entry(fd).or_default() += 1;
        } else {
            let file = flight.lent.take();
            self.release(file);
        }
        pushed
    }

    /// Lets an operation wait before its next call, or fails it when it is too late for that.
    pub(super) fn pause(&mut self, token: u64, retry: u32) {
        let Some(flight) = self.flights.get(&token) else {
            return;
        };
        let now = self.shared.intake.clock().now();
        match now.checked_add(pause_before(retry)) {
            Some(due) if now < flight.operation.deadline => self.waits.pause(due, token),
            _ => self.end(token, Some(Failure::Os(libc::EAGAIN))),
        }
    }

    /// Ends an operation of which the kernel has nothing.
    pub(super) fn end(&mut self, token: u64, failure: Option<Failure>) {
        let Some(flight) = self.flights.get_mut(&token) else {
            return;
        };
        if let Some(failure) = failure {
            flight.fail(failure);
        }
        let held = flight.work.as_ref().map_or(0, Work::bounce_bytes);
        self.bounce_bytes = self.bounce_bytes.saturating_sub(held);
        let passage = flight.passage(&self.shared.mode);
        let executed = flight.finish(&self.shared.mode, &mut self.bounce);
        let looked = flight.looked.take();
        if let Some(flight) = self.flights.remove(&token) {
            let mut state = self.shared.intake.lock();
            state.queue.make_room(flight.operation.id);
            drop(state);
            self.ended.push_back((flight.operation, executed));
        }
        self.release(looked.and_then(Result::ok).map(|(file, _)| file));
        if let Some(passage) = passage {
            self.shared.errands.settle(&self.shared, passage);
        }
    }

    /// Asks the kernel to give back what is past its deadline, and ends what waits for a look at
    /// its file.
    fn cancel_overdue(&mut self) {
        let Some(now) = self.shared.intake.lock().own.overdue.take() else {
            return;
        };
        for (token, flight) in &mut self.flights {
            let is_overdue = flight.operation.deadline <= now && flight.lent.is_some();
            if is_overdue && !flight.cancelled && self.ring.push_cancel(*token) {
                flight.cancelled = true;
                self.cancelled += 1;
            }
        }
        self.end_late_looks(now);
    }

    /// Completes what has ended, a little of it.
    fn deliver(&mut self) {
        let mut bytes = 0_u64;
        while bytes < TURN_BYTES
            && let Some((operation, executed)) = self.ended.pop_front()
        {
            bytes = bytes.saturating_add(executed.transferred_bytes);
            self.shared.intake.lock().queue.end(operation.id);
            self.shared.intake.complete(operation, executed);
        }
    }

    /// Completes everything that has ended.
    pub(super) fn deliver_all(&mut self) {
        while !self.ended.is_empty() {
            self.deliver();
        }
    }

    /// Sleeps until the kernel has returned something, somebody wakes the thread, or a pause is
    /// over.
    fn sleep(&mut self) {
        let has_room = self.has_room();
        let mut state = self.shared.intake.lock();
        let refuses = state.closing || self.shared.intake.poisoned();
        let can_start = has_room && !refuses && state.queue.can_start();
        let is_over = state.closing && self.flights.is_empty();
        if can_start || is_over || state.own.overdue.is_some() || !state.own.looked.is_empty() {
            return;
        }
        state.own.asleep = if has_room {
            Asleep::UntilWork
        } else {
            Asleep::Full
        };
        drop(state);
        let due = self.waits.next();
        let now = self.shared.intake.clock().now();
        let entered = self
            .ring
            .wait(due.map(|due| due.saturating_duration_since(now)));
        self.shared.intake.lock().own.asleep = Asleep::No;
        self.entered(entered);
    }

    /// Counts system calls that fail although nothing is wrong with what they were given.
    fn entered(&mut self, entered: std::io::Result<()>) {
        let Err(error) = entered else {
            (self.failures, self.refusals) = (0, 0);
            return;
        };
        match errno(&error) {
            libc::EINTR | libc::EBUSY => return,
            libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EOPNOTSUPP => self.refusals += 1,
            _ => self.failures += 1,
        }
        self.shared.intake.clock().sleep(FAILURE_PAUSE);
    }
}
