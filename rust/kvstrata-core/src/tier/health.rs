//! How the device has been doing: a circuit for reads, one for writes, and the last error.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value};

use crate::io::{Direction, Failure, OperationId};
use crate::job::{JobKind, Outcome};
use crate::metrics::count;
use crate::notice::Level;
use crate::sys::errno::errno_name;
use crate::sys::sync::{Arc, Mutex, lock};
use crate::tier::circuit::{Circuit, CircuitLimits, Trial};
use crate::tier::disk::DiskTier;
use crate::tier::last_error::{Cause, LastError, tail};
use crate::tier::request::Request;
use crate::tier::state::{Flight, State};
use crate::tier::trial::WriteTrial;

/// Why a job was not tried.
pub(super) const REFUSED: &str = "the device keeps failing: not tried";

/// The circuits and what is on trial.
#[derive(Debug)]
pub(super) struct Circuits {
    pub(super) reads: Circuit,
    pub(super) writes: Circuit,
    /// The read that is on trial.
    pub(super) read_trial: Option<OperationId>,
    /// How far the write that is on trial has come.
    pub(super) write_trial: WriteTrial,
    /// When that write is overdue.
    pub(super) write_late: Option<Instant>,
    /// Trials begun, to choose another row each time.
    pub(super) trials: usize,
    last_error: Option<LastError>,
}

impl Circuits {
    pub(super) const fn of(&mut self, direction: Direction) -> &mut Circuit {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }
}

/// What a tier knows of its device. Its lock is taken last and held for a few instructions.
#[derive(Debug)]
pub(crate) struct Health {
    circuits: Mutex<Circuits>,
    refuses_reads: AtomicBool,
    refuses_writes: AtomicBool,
    /// Set while a success would change a circuit: in good times none takes the lock.
    troubled: AtomicBool,
}

impl Health {
    /// A healthy device.
    pub(crate) const fn new(limits: CircuitLimits) -> Self {
        Self {
            circuits: Mutex::new(Circuits {
                reads: Circuit::new(limits),
                writes: Circuit::new(limits),
                read_trial: None,
                write_trial: WriteTrial::None,
                write_late: None,
                trials: 0,
                last_error: None,
            }),
            refuses_reads: AtomicBool::new(false),
            refuses_writes: AtomicBool::new(false),
            troubled: AtomicBool::new(false),
        }
    }

    /// Does `work` on the circuits.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Circuits) -> T) -> T {
        let mut circuits = lock(&self.circuits);
        let done = work(&mut circuits);
        let (reads, writes) = (&circuits.reads, &circuits.writes);
        self.refuses_reads.store(reads.refuses(), Ordering::Release);
        self.refuses_writes
            .store(writes.refuses(), Ordering::Release);
        let untroubled = reads.is_untroubled() && writes.is_untroubled();
        self.troubled.store(!untroubled, Ordering::Release);
        done
    }

    /// Whether operations of this direction are refused.
    pub(crate) fn refuses(&self, direction: Direction) -> bool {
        let flag = match direction {
            Direction::Read => &self.refuses_reads,
            Direction::Write => &self.refuses_writes,
        };
        flag.load(Ordering::Acquire)
    }

    /// Counts a success.
    pub(crate) fn succeed(&self, direction: Direction) {
        if self.troubled.load(Ordering::Acquire) {
            self.with(|circuits| circuits.of(direction).succeed());
        }
    }

    /// When the keeper is to look at the circuits.
    pub(crate) fn due(&self) -> Option<Instant> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        self.with(|circuits| {
            let both = [circuits.reads.due(), circuits.writes.due()];
            both.into_iter().flatten().min()
        })
    }

    /// Remembers the error that a tier says last, and counts it where the device is to blame;
    /// `Some`, with the time to the first trial, when that opened the circuit.
    pub(super) fn fail(
        &self,
        direction: Direction,
        of_device: bool,
        error: LastError,
    ) -> Option<Duration> {
        self.with(|circuits| {
            let now = error.at;
            circuits.last_error = Some(error);
            let circuit = circuits.of(direction);
            of_device.then(|| circuit.fail(now)).flatten()
        })
    }

    /// Remembers the error that a tier says last.
    pub(super) fn remember(&self, error: LastError) {
        lock(&self.circuits).last_error = Some(error);
    }

    /// Adds the circuits and the last error to statistics; says whether a circuit is not closed.
    pub(crate) fn add_to(&self, all: &mut Map<String, Value>, now: Instant) -> bool {
        let circuits = lock(&self.circuits);
        all.insert("circuit_reads".into(), circuits.reads.as_str().into());
        all.insert("circuit_writes".into(), circuits.writes.as_str().into());
        let last = circuits.last_error.as_ref();
        let last = last.map_or(Value::Null, |last| last.to_json(now));
        all.insert("last_error".into(), last);
        circuits.reads.refuses() || circuits.writes.refuses()
    }
}

/// Which way the operations of a job go, and what one is called.
pub(super) const fn direction_of(kind: JobKind) -> (Direction, &'static str) {
    match kind {
        JobKind::Load => (Direction::Read, "read"),
        JobKind::Store => (Direction::Write, "write"),
    }
}

/// The word for operations of a direction.
const fn plural(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "reads",
        Direction::Write => "writes",
    }
}

impl DiskTier {
    /// Whether operations of this direction are refused; who is refused wakes the keeper when the
    /// time for a trial has come by the tier's clock.
    pub(super) fn refuses(&self, direction: Direction) -> bool {
        let refused = self.health.refuses(direction);
        if refused
            && let Some(due) = self.health.due()
            && due <= self.around.clock.now()
        {
            self.watch.notify_one();
        }
        refused
    }

    /// Notes that the device failed in `operation` on `path`: the error is the last one from here
    /// on, and the circuit may open. Not to be called with the state's lock held.
    pub(super) fn device_failed(
        &self,
        direction: Direction,
        cause: Cause,
        operation: &'static str,
        path: &Path,
    ) {
        let error = self.last_error(cause, operation, path);
        if let Some(pause) = self
            .health
            .fail(direction, cause.is_of_device(), error.clone())
        {
            self.say_given_up(direction, &error, pause);
        }
    }

    /// What failed now.
    pub(super) fn last_error(
        &self,
        cause: Cause,
        operation: &'static str,
        path: &Path,
    ) -> LastError {
        LastError {
            errno: cause.name(),
            operation,
            path: tail(path),
            text: cause.text(),
            at: self.around.clock.now(),
        }
    }

    /// Tells that a circuit opened, and wakes the keeper for its trial. Not to be called with the
    /// state's lock held.
    pub(super) fn say_given_up(&self, direction: Direction, error: &LastError, pause: Duration) {
        self.around.metrics.circuit_openings.add(1);
        let what = plural(direction);
        let subject = match direction {
            Direction::Read => "reads given up",
            Direction::Write => "writes given up",
        };
        self.around.notices.say(Level::Error, subject, || {
            let LastError {
                errno,
                operation,
                path,
                text,
                ..
            } = error;
            format!(
                "{what} keep failing and are given up ({errno}: {operation} of {path}: {text}); \
                 the first trial is in {pause:?}"
            )
        });
        // Taking the lock once orders this before the keeper's next look at the circuits.
        drop(lock(&self.state));
        self.watch.notify_one();
    }

    /// Ends a load that reads are given up for: its rows stay, its slots are not touched.
    pub(super) fn refuse_load(&self, state: &mut State, request: &Arc<Request>) {
        let metrics = &self.around.metrics;
        metrics.circuit_missed_loads.add(count(request.items.len()));
        self.settle_rest(state, request, 0, Outcome::Miss, REFUSED);
    }

    /// Drops what of a store is left, from position `next` on, because writes are given up.
    pub(super) fn refuse_store(&self, state: &mut State, request: &Arc<Request>, next: usize) {
        let left = request.items.len().saturating_sub(next);
        self.around.metrics.circuit_dropped_stores.add(count(left));
        self.settle_rest(state, request, next, Outcome::Dropped, REFUSED);
    }

    fn path_of(&self, flight: &Flight) -> PathBuf {
        let state = lock(&self.state);
        let place = flight.rows.first().map(|row| row.place);
        place
            .and_then(|place| state.inventory.row_file(place))
            .map_or_else(|| self.root.path().to_path_buf(), |file| file.path())
    }

    /// Whether a panic has ended the engine: nothing is loaded or stored any more.
    pub(super) fn is_engine_poisoned(&self) -> bool {
        self.engine.get().is_some_and(|engine| engine.poisoned())
    }

    /// Logs that an operation failed; a panic of the engine, which fails all of them, once.
    pub(super) fn say_failed(&self, subject: &'static str, failure: Failure, text: &str) {
        let notices = &self.around.notices;
        if failure != Failure::Poisoned {
            notices.say(Level::Warning, subject, || text.to_owned());
        } else if !self.panic_told.swap(true, Ordering::AcqRel) {
            notices.say(Level::Error, "engine", || {
                format!("{failure}: nothing is loaded or stored any more")
            });
        }
    }

    /// Notes that an operation of a job failed.
    pub(super) fn flight_failed(&self, flight: &Flight, failure: Failure) {
        if let Some(cause) = Cause::of_failure(failure) {
            let (direction, operation) = direction_of(flight.request.kind);
            self.device_failed(direction, cause, operation, &self.path_of(flight));
        }
    }

    /// What a failed operation says in the log and in its job's result.
    pub(super) fn failure_text(&self, what: &str, flight: &Flight, failure: Failure) -> String {
        let (_, operation) = direction_of(flight.request.kind);
        let path = tail(&self.path_of(flight));
        match failure {
            Failure::Os(errno) => {
                format!(
                    "{what} ({}): {operation} of {path}: {failure}",
                    errno_name(errno)
                )
            }
            _ => format!("{what}: {operation} of {path}: {failure}"),
        }
    }

    /// Ends a trial: the circuit closes or is open again.
    pub(super) fn end_trial(&self, direction: Direction, cause: Option<Cause>) {
        let now = self.around.clock.now();
        let success = cause.is_none_or(|cause| !cause.is_of_device());
        let ended = self
            .health
            .with(|circuits| circuits.of(direction).end_trial(now, success));
        if let Trial::Closed(since) = ended {
            let what = plural(direction);
            let subject = match direction {
                Direction::Read => "reads taken up",
                Direction::Write => "writes taken up",
            };
            let lasted = now.saturating_duration_since(since);
            self.around.notices.say(Level::Info, subject, || {
                format!("{what} work again after {:.1} s", lasted.as_secs_f64())
            });
        }
        drop(lock(&self.state));
        self.watch.notify_one();
    }
}
