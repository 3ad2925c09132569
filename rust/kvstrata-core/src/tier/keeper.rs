//! The keeper thread: gives up what is past its deadline.

use core::time::Duration;

use crate::job::{JobKind, Outcome};
use crate::sys::sync::{Arc, lock, wait, wait_timeout};
use crate::tier::disk::DiskTier;
use crate::tier::request::Request;
use crate::tier::state::{Flight, Phase};

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
                self.expire_request(&request);
            }
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
            if !due.is_empty() {
                state.overdue = true;
                return Some(due);
            }
            let next = state.deadlines.front().map(|front| front.deadline);
            let late = |flight: &Flight| flight.request.deadline <= now;
            let overdue = state.overdue && state.flights.values().any(late);
            state.overdue = overdue;
            state = match (next, overdue) {
                (None, false) => wait(&self.watch, state),
                (_, true) => {
                    let state = wait_timeout(&self.watch, state, OVERDUE_INTERVAL);
                    if state.phase == Phase::Stopping {
                        return None;
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

    /// Ends what of a job has not started, and, where the caller honours busy slots, its loads.
    fn expire_request(&self, request: &Arc<Request>) {
        match request.kind {
            JobKind::Store => {
                let mut state = lock(&self.state);
                let at = state
                    .queued
                    .iter()
                    .position(|q| Arc::ptr_eq(&q.request, request));
                if let Some(store) = at.and_then(|at| state.queued.remove(at)) {
                    let why = "not started by its deadline";
                    self.settle_rest(&mut state, request, store.next, Outcome::Timeout, why);
                }
            }
            JobKind::Load if self.honours_busy => self.abandon_loads(request),
            JobKind::Load => {}
        }
    }
}
