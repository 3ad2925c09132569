//! The keeper thread: gives up what is past its deadline.

use core::time::Duration;

use crate::job::{JobKind, Outcome};
use crate::sys::sync::{Arc, lock, wait, wait_timeout};
use crate::tier::disk::DiskTier;
use crate::tier::health::direction_of;
use crate::tier::last_error::Cause;
use crate::tier::phase::Phase;
use crate::tier::request::Request;
use crate::tier::state::{Flight, State};

/// How often the engine is asked again while operations are overdue: it replaces stuck threads.
const OVERDUE_INTERVAL: Duration = Duration::from_millis(200);

impl DiskTier {
    /// Body of the keeper thread; sleeps while no job is open.
    pub(super) fn keep_loop(&self) {
        while let Some(due) = self.next_due() {
            if let Ok(engine) = self.engine() {
                engine.expire(self.around.clock.now());
            }
            for request in due {
                self.note_late(&request);
                self.expire_request(&request);
            }
            self.begin_trials();
        }
    }

    /// Waits for deadlines to pass; `None` when the tier stops.
    fn next_due(&self) -> Option<Vec<Arc<Request>>> {
        let mut state = lock(&self.state);
        loop {
            if state.phase == Phase::Stopping {
                return None;
            }
            let now = self.around.clock.now();
            let mut due = Vec::new();
            while let Some(front) = state.deadlines.front()
                && (front.is_done() || front.deadline <= now)
            {
                due.extend(
                    state
                        .deadlines
                        .pop_front()
                        .filter(|request| !request.is_done()),
                );
            }
            let trial = self.health.due();
            if !due.is_empty() || trial.is_some_and(|at| at <= now) {
                state.overdue |= !due.is_empty();
                return Some(due);
            }
            let deadline = state.deadlines.front().map(|front| front.deadline);
            let next = [deadline, trial].into_iter().flatten().min();
            state.late.retain(|request| !request.is_done());
            let late = |flight: &Flight| flight.request.deadline <= now;
            let overdue =
                !state.late.is_empty() || state.overdue && state.flights.values().any(late);
            state.overdue = overdue;
            state = match (next, overdue) {
                (None, false) => wait(&self.watch, state),
                (_, true) => {
                    let state = wait_timeout(&self.watch, state, OVERDUE_INTERVAL);
                    if state.phase == Phase::Stopping {
                        return None;
                    }
                    if !state.late.is_empty() {
                        return Some(state.late.clone());
                    }
                    drop(state);
                    // Threads that hang past their deadline are replaced.
                    if let Ok(engine) = self.engine() {
                        engine.expire(self.around.clock.now());
                    }
                    lock(&self.state)
                }
                (Some(at), false) => {
                    wait_timeout(&self.watch, state, at.saturating_duration_since(now))
                }
            };
        }
    }

    /// Counts a job that is past its deadline against the device, once, however many operations
    /// it has. It is counted when this returns, whichever thread counted it: what comes next drops
    /// rows, unless reads are given up.
    pub(super) fn note_late(&self, request: &Arc<Request>) {
        // Held throughout: another operation of the job waits here until the job is counted.
        let state = lock(&self.state);
        if !request.note_late() {
            return;
        }
        let own = |flight: &&Flight| Arc::ptr_eq(&flight.request, request);
        let place = state
            .flights
            .values()
            .find(own)
            .and_then(|f| f.rows.first());
        let path = place
            .and_then(|row| state.inventory.row_file(row.place))
            .map_or_else(|| self.root.path().to_path_buf(), |file| file.path());
        let (direction, operation) = direction_of(request.kind);
        let error = self.last_error(Cause::Late, operation, &path);
        let opened = self
            .health
            .fail(direction, Cause::Late.is_of_device(), error.clone());
        drop(state);
        if let Some(pause) = opened {
            self.say_given_up(direction, &error, pause);
        }
    }

    /// Ends what of a job has not started, and of a load what frees nothing the kernel has.
    fn expire_request(&self, request: &Arc<Request>) {
        match request.kind {
            JobKind::Store => {
                let mut state = lock(&self.state);
                let at = state
                    .queued
                    .iter()
                    .position(|q| Arc::ptr_eq(&q.request, request));
                let store = at.and_then(|at| state.queued.remove(at));
                let was_begun = store.as_ref().is_some_and(|store| store.is_begun);
                if let Some(store) = store {
                    let why = "not started by its deadline";
                    self.settle_rest(&mut state, request, store.next, Outcome::Timeout, why);
                }
                if !request.is_done() {
                    self.abandon_store(&mut state, request);
                }
                if was_begun {
                    self.end_planning(state);
                }
            }
            JobKind::Load => self.expire_load(request),
        }
    }

    /// Ends the keys of a store that the kernel has no slots of: its planning, or the writing of
    /// its entries, hangs in the file system, and the writer hands the engine none of its rows any
    /// more.
    ///
    /// The keeper comes back for what is left: keys that the engine has may wait for a writer that
    /// hangs when they come back.
    fn abandon_store(&self, state: &mut State, request: &Arc<Request>) {
        request.abandon();
        let why = "not written down by its deadline";
        self.end_open_keys(state, request, Outcome::Timeout, why);
        let known = state.late.iter().any(|late| Arc::ptr_eq(late, request));
        if !known && !request.is_done() {
            state.late.push(Arc::clone(request));
        }
    }
}
