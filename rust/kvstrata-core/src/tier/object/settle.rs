//! Keys get their outcomes.

use crate::job::{JobKind, Outcome, Settlement};
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::{count, plain};
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
        let metrics = &self.around.metrics;
        let mut settled_bytes = 0_u64;
        for settlement in settlements {
            metrics.count(request.kind, settlement.outcome);
            let item = request.items.get(settlement.position);
            let row_bytes = item.map_or(0, |item| item.row_bytes);
            settled_bytes = settled_bytes.saturating_add(count(row_bytes));
            match request.kind {
                JobKind::Store => metrics.bytes_stored.add(settlement.bytes),
                JobKind::Load => metrics.bytes_loaded.add(settlement.bytes),
            }
        }
        let open = match request.kind {
            JobKind::Load => &mut state.load_bytes_open,
            JobKind::Store => &mut state.store_bytes_open,
        };
        *open = open.saturating_sub(settled_bytes);
        if request.settle(settlements.len()) {
            self.note_end(request);
        }
        self.around.jobs.settle(request.job_id, settlements, error);
    }

    fn note_end(&self, request: &Request) {
        let now = self.around.clock.now();
        let left = request.deadline.saturating_duration_since(now);
        let late = now.saturating_duration_since(request.deadline);
        let age = self
            .options
            .deadline
            .saturating_sub(left)
            .saturating_add(late);
        let latency = &self.around.metrics.latency;
        match request.kind {
            JobKind::Load => latency.load.record(age),
            JobKind::Store => latency.store.record(age),
        }
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
            .map(|position| plain(position, outcome))
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
            let one = plain(work.position, outcome(work.request.kind));
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
            ..plain(work.position, end.outcome)
        };
        self.settle(&mut state, &work.request, &[one], end.error.as_deref());
        drop(state);
        self.quiet.notify_all();
    }
}
