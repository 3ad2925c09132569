//! Resets: another epoch, recorded in the bucket before anyone is told.

use crate::error::Result;
use crate::job::{JobKind, Outcome};
use crate::notice::Level;
use crate::object::Failure;
use crate::sys::sync::{Arc, lock};
use crate::tier::object::dispatch::Ended;
use crate::tier::object::state::State;
use crate::tier::object::{ObjectTier, Place};

impl ObjectTier {
    /// Begins a new epoch. False when it could not be recorded: the tier then answers miss to
    /// everything and stores nothing until a later reset succeeds.
    pub(super) fn begin_epoch(self: &Arc<Self>) -> Result<bool> {
        let _one_at_a_time = lock(&self.resetting);
        let mut state = self.open_state()?;
        self.forget_everything(&mut state);
        let Some(place) = state.place.clone() else {
            state.reset_wanted = true;
            return Ok(false);
        };
        drop(state);
        let now = self.around.clock.now();
        let late = now.checked_add(self.options.deadline).unwrap_or(now);
        let conditional = place.conditional_put;
        let epochs = self.epochs(&place.store, conditional);
        let newer = epochs.advance(place.epoch.number);
        let advanced = match self.handle.block_on(self.until(late, newer)) {
            Ended::Done(advanced) => advanced,
            Ended::Late | Ended::Stopped => Err(Failure::late()),
        };
        let mut state = lock(&self.state);
        let recorded = match advanced {
            Ok(epoch) => {
                state.place = Some(Arc::new(Place {
                    store: Arc::clone(&place.store),
                    epoch,
                    conditional_put: conditional,
                    style: place.style,
                }));
                // What an answer on its way has noted since is of the old epoch.
                self.verdicts.clear();
                state.reset_failed = false;
                true
            }
            Err(failure) => {
                self.around.metrics.errors.add(1);
                self.around.notices.say(Level::Error, "reset", || {
                    format!("reset could not be recorded, the tier serves nothing: {failure}")
                });
                false
            }
        };
        drop(state);
        self.list.notify_one();
        Ok(recorded)
    }

    /// Hides every row, gives up what has not started; what is under way will end as if it had.
    fn forget_everything(&self, state: &mut State) {
        state.generation = state.generation.saturating_add(1);
        state.reset_failed = true;
        let queued = state.take_queued(|_| true);
        let outcome = |kind| match kind {
            JobKind::Store => Outcome::Dropped,
            JobKind::Load => Outcome::Miss,
        };
        self.settle_queued(state, &queued, outcome, "reset");
        self.verdicts.clear();
        state.asked.retain(|_, asked| asked.under_way);
        state.to_ask.clear();
        state.listed_at = None;
        state.looked_up = true;
        state.forget_objects();
    }
}
