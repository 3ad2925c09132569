//! Keys of the disk tier's jobs get their outcomes.

use crate::job::{JobKind, Outcome, Settlement};
use crate::sys::sync::Arc;
use crate::tier::disk::DiskTier;
use crate::tier::request::Request;
use crate::tier::state::State;

impl DiskTier {
    /// Gives keys of a job their outcomes.
    pub(super) fn settle(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        settlements: &[Settlement],
        error: Option<&str>,
    ) {
        let open;
        let settlements = if self.is_poisoned() || request.is_abandoned() {
            if request.is_done() {
                // Its number may be another job's by now.
                return;
            }
            // Who dropped the keys of a lost or late thread may have been quicker.
            let positions = self.around.jobs.open_positions(request.job_id);
            let is_open = |one: &&Settlement| positions.binary_search(&one.position).is_ok();
            open = settlements
                .iter()
                .filter(is_open)
                .cloned()
                .collect::<Vec<_>>();
            &open
        } else {
            settlements
        };
        if settlements.is_empty() {
            return;
        }
        let bytes_settled = self.around.count_settled(request, settlements);
        let last = request.settle(settlements.len());
        if last {
            self.around.note_end(request, self.deadline);
        }
        if request.kind == JobKind::Load {
            state.load_bytes_open = state.load_bytes_open.saturating_sub(bytes_settled);
        } else {
            state.store_bytes_open = state.store_bytes_open.saturating_sub(bytes_settled);
            if !last && state.written.settled(request) {
                self.work.notify_one();
            }
            if last {
                order_stored(state, request, self.around.clock.unix_seconds());
            }
        }
        self.around.jobs.settle(request.job_id, settlements, error);
    }

    /// Gives all keys from position `next` on the same outcome.
    pub(super) fn settle_rest(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        next: usize,
        outcome: Outcome,
        error: &str,
    ) {
        let rest: Vec<_> = (next..request.items.len())
            .map(|position| Settlement::plain(position, outcome))
            .collect();
        self.settle(state, request, &rest, Some(error));
    }
}

/// Puts the rows of a finished store in the order of its keys: the tail is the oldest.
fn order_stored(state: &mut State, request: &Request, now: u32) {
    let mut entries = Vec::new();
    for (position, entry) in request.take_stored() {
        let same = state.inventory.index.get(entry).is_some_and(|found| {
            found.listed
                && request
                    .items
                    .get(position)
                    .is_some_and(|i| i.fingerprint == found.fingerprint)
        });
        if same {
            entries.push(entry);
        }
    }
    state.inventory.access(&entries, now);
}
