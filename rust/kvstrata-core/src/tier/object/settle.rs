//! Keys get their outcomes.

use crate::job::{JobKind, Outcome, Settlement};
use crate::metrics::count;
use crate::sys::sync::{Arc, lock};
use crate::tier::object::ObjectTier;
use crate::tier::object::state::{State, Work};
use crate::tier::request::Request;

/// How a row ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) outcome: Outcome,
    pub(super) error: Option<String>,
}

impl End {
    pub(super) const fn plain(outcome: Outcome) -> Self {
        Self {
            outcome,
            error: None,
        }
    }

    pub(super) fn with(outcome: Outcome, error: impl Into<String>) -> Self {
        Self {
            outcome,
            error: Some(error.into()),
        }
    }
}

impl ObjectTier {
    /// Gives keys of a job their outcomes.
    pub(super) fn settle(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        settlements: &[Settlement],
        error: Option<&str>,
    ) {
        if settlements.is_empty() {
            return;
        }
        let settled_bytes = self.around.count_settled(request, settlements);
        let open = match request.kind {
            JobKind::Load => &mut state.load_bytes_open,
            JobKind::Store => &mut state.store_bytes_open,
        };
        *open = open.saturating_sub(settled_bytes);
        if request.settle(settlements.len()) {
            self.around.note_end(request, self.options.deadline);
        }
        self.around.jobs.settle(request.job_id, settlements, error);
    }

    /// Gives all keys of a job the same outcome.
    pub(super) fn settle_all(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        outcome: Outcome,
        error: &str,
    ) {
        let all: Vec<_> = (0..request.items.len())
            .map(|position| Settlement::plain(position, outcome))
            .collect();
        self.settle(state, request, &all, Some(error));
    }

    /// Ends rows that never started.
    pub(super) fn settle_queued(
        &self,
        state: &mut State,
        rows: &[Work],
        outcome: impl Fn(JobKind) -> Outcome,
        error: &str,
    ) {
        for work in rows {
            let one = Settlement::plain(work.position, outcome(work.request.kind));
            self.settle(state, &work.request, &[one], Some(error));
        }
    }

    /// Puts the object of some work in line to be deleted, unless a reset has hidden it anyway.
    pub(super) fn delete_later(&self, state: &mut State, work: &Work) {
        if work.generation != state.generation {
            return;
        }
        let of = work.item.fingerprint.half();
        let added = state.deletions.add(of, &work.place, work.item.key);
        self.counters.deletions_left_out.add(u64::from(!added));
    }

    /// Ends a row that was under way.
    pub(super) fn end_work(&self, work: &Work, end: End) {
        let mut state = lock(&self.state);
        let row_bytes = count(work.item.row_bytes);
        state.running = state.running.saturating_sub(1);
        state.running_bytes = state.running_bytes.saturating_sub(row_bytes);
        let mut end = end;
        let removed = state.end_moving(work.request.kind, work.item.fingerprint);
        if removed && work.request.kind == JobKind::Store {
            end = End::with(Outcome::Dropped, "removed meanwhile");
            self.delete_later(&mut state, work);
        }
        if work.generation != state.generation {
            // Stored where nobody looks any more, or loaded from there.
            end = match work.request.kind {
                JobKind::Store => End::with(Outcome::Dropped, "reset"),
                JobKind::Load => End::with(Outcome::Miss, "reset"),
            };
        }
        let moved = end.outcome == Outcome::Ok;
        let one = Settlement {
            bytes: if moved { row_bytes } else { 0 },
            ..Settlement::plain(work.position, end.outcome)
        };
        self.settle(&mut state, &work.request, &[one], end.error.as_deref());
        drop(state);
        self.quiet.notify_all();
    }
}
