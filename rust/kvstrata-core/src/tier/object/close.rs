//! Closing: admission ends, what runs ends, the rest is given up.

use core::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::job::{JobKind, Outcome};
use crate::sys::sync::{lock, wait_timeout};
use crate::tier::object::{CLOSE_SLICE, ObjectTier};
use crate::tier::phase::Phase;

impl ObjectTier {
    /// Whether no request touches the arena any more; waits up to `timeout`.
    pub(super) fn is_quiet_within(&self, timeout: Duration) -> bool {
        self.around.jobs.wait_idle(timeout) && lock(&self.state).running == 0
    }

    /// Closes the tier within about `timeout`: calls are refused from now on, jobs may end, those
    /// not over by then are given up.
    ///
    /// # Errors
    /// `Busy` while the HTTP client still has bytes of a slot; call again later.
    pub(super) fn close_within(&self, timeout: Duration) -> Result<()> {
        let clock = &self.around.clock;
        let begun = clock.now();
        let left = || timeout.saturating_sub(clock.now().saturating_duration_since(begun));
        {
            let mut state = lock(&self.state);
            state.phase = state.phase.max(Phase::Closing);
        }
        self.around.jobs.wait_idle(left());
        let mut state = lock(&self.state);
        while !state.deletions.is_quiet() && !left().is_zero() {
            state = wait_timeout(&self.quiet, state, CLOSE_SLICE.min(left()));
        }
        state.phase = Phase::Stopping;
        let undeleted = state.deletions.len();
        let queued = state.take_queued(|_| true);
        let outcome = |kind| match kind {
            JobKind::Store => Outcome::Dropped,
            JobKind::Load => Outcome::Timeout,
        };
        self.settle_queued(&mut state, &queued, outcome, "closed");
        drop(state);
        self.say_left(undeleted);
        self.stop.send_replace(true);
        // A reset under way is told of it, and runs on this runtime until it has heard.
        let reset_is_over = lock(&self.resetting);
        // What was stopped ends at once, unless a connection does not let go.
        let patience = left().max(Duration::from_secs(1));
        let stopped_at = clock.now();
        let mut state = lock(&self.state);
        while state.running > 0 {
            let waited = clock.now().saturating_duration_since(stopped_at);
            if waited >= patience {
                let text = "bytes of the arena are still in use; close again later";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            state = wait_timeout(&self.quiet, state, CLOSE_SLICE);
        }
        drop(state);
        if let Some(runtime) = lock(&self.runtime).take() {
            runtime.shutdown_background();
        }
        drop(reset_is_over);
        Ok(())
    }
}
