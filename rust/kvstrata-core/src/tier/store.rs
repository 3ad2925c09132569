//! Stores: queued by the caller's thread, planned by the writer thread.

use crate::error::Result;
use crate::index::RowPlace;
use crate::io::{Completion, Direction, Failure};
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::metrics::count;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::file_trouble::is_lost;
use crate::tier::load::is_device_error;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, QueuedStore, State};

impl DiskTier {
    /// Queues a store; returns at once.
    ///
    /// Stores are bounded: while more payload than the arena holds is queued or being written,
    /// further jobs end as `dropped`.
    ///
    /// # Errors
    /// `Argument` for a wrong argument, `Closed` after close; then nothing was begun.
    pub(crate) fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        let items = self.items(keys, offsets)?;
        let now = self.around.clock.now();
        let deadline = now.checked_add(self.deadline).unwrap_or(now);
        let mut state = self.open_state()?;
        let request = Arc::new(Request::new(job_id, JobKind::Store, items, deadline));
        self.around
            .jobs
            .begin(job_id, JobKind::Store, request.items.len())?;
        self.around
            .metrics
            .offer(JobKind::Store, request.items.len());
        if request.items.is_empty() {
            return Ok(());
        }
        let open = state.store_bytes_open;
        let bytes = request.bytes();
        state.store_bytes_open = open.saturating_add(bytes);
        let full = open > 0 && open.saturating_add(bytes) > count(self.around.arena.length());
        if full || state.reset_failed || self.is_poisoned() {
            let reason = if full {
                "too many bytes are being stored"
            } else {
                "the tier stores nothing"
            };
            self.settle_rest(&mut state, &request, 0, Outcome::Dropped, reason);
            return Ok(());
        }
        if self.refuses(Direction::Write) {
            self.refuse_store(&mut state, &request, 0);
            return Ok(());
        }
        let offered = request.items.iter().map(|item| item.fingerprint);
        state.inventory.offered(offered);
        let watch = state.watch(&request);
        let epoch = state.epoch;
        let number = state.removals.ask();
        state.queued.push_back(QueuedStore {
            request,
            next: 0,
            epoch,
            number,
            is_begun: false,
        });
        drop(state);
        self.work.notify_one();
        if watch {
            self.watch.notify_one();
        }
        Ok(())
    }

    /// Raises a file's incarnation and clears the entries of rows in it that are to be written.
    ///
    /// # Errors
    /// The device's; the rows must then not be written.
    pub(super) fn clear_for_writing(&self, places: &[RowPlace]) -> std::io::Result<()> {
        let Some(first) = places.first() else {
            return Ok(());
        };
        let state = lock(&self.state);
        let Some(container) = state.inventory.container(first.container) else {
            return Err(std::io::Error::from_raw_os_error(libc::ENOENT));
        };
        let row_file = Arc::clone(&container.row_file);
        let uncleared: Vec<u32> = places
            .iter()
            .map(|place| place.row)
            .filter(|row| container.rows.is_stale(*row))
            .collect();
        drop(state);
        row_file.raise_incarnation(self.writer)?;
        if !uncleared.is_empty() {
            row_file.clear_entries(&uncleared)?;
        }
        let mut state = lock(&self.state);
        if let Some(container) = state.inventory.container_mut(first.container) {
            for row in uncleared {
                container.rows.set_stale(row, false);
            }
        }
        Ok(())
    }

    /// Gives up rows that cannot be made safe to overwrite; returns how their keys end.
    pub(super) fn give_up_rows(&self, places: &[RowPlace], error: &std::io::Error) -> Outcome {
        if let Some(place) = places.first() {
            self.file_failed(place.container, error);
        }
        let mut state = lock(&self.state);
        for place in places {
            // The old entry may still be there: it is cleared before the row is used again.
            state.inventory.free_row(*place, true);
        }
        outcome_of(error.raw_os_error())
    }

    /// Takes a write operation back: its entries are next, or its rows are free again.
    pub(super) fn complete_store(&self, mut flight: Flight, completion: &Completion) {
        let summed = flight.sums.clone().hand_out(&mut flight.rows);
        match &completion.result {
            Ok(()) if !summed => self.settle_write_failure(&flight, Failure::Poisoned),
            Ok(()) => {
                let mut state = lock(&self.state);
                if self.is_poisoned() {
                    // Nobody writes entries any more: the rows hold nothing.
                    self.end_store(&mut state, &flight, |_| Outcome::Dropped, Some("poisoned"));
                    return;
                }
                let is_due = state.written.push(flight);
                drop(state);
                if is_due {
                    self.work.notify_one();
                }
            }
            Err(failure) => self.settle_write_failure(&flight, *failure),
        }
    }

    fn settle_write_failure(&self, flight: &Flight, failure: Failure) {
        let outcome = match failure {
            Failure::TimedOut => Outcome::Timeout,
            Failure::Closed | Failure::Poisoned => Outcome::Dropped,
            Failure::Os(errno) => outcome_of(Some(errno)),
            Failure::Short => Outcome::IoError,
        };
        if failure == Failure::TimedOut {
            self.note_late(&flight.request);
        }
        self.flight_failed(flight, failure);
        let retire = is_device_error(failure) && !self.health.refuses(Direction::Write);
        // A file without its name, or cut, takes no more rows.
        let gone = is_lost(failure);
        let text = self.failure_text("store failed", flight, failure);
        self.around.metrics.errors.add(1);
        self.say_failed("store", failure, &text);
        let mut state = lock(&self.state);
        for row in &flight.rows {
            if gone {
                self.lose_file(&mut state, row.place.container);
            }
            if retire {
                state.inventory.retire_row(row.place);
                self.around.metrics.retired_rows.add(1);
            } else {
                state.inventory.free_row(row.place, false);
            }
        }
        self.end_store(&mut state, flight, |_| outcome, Some(&text));
    }

    /// Settles the rows of a store and whoever stored the same keys.
    pub(super) fn end_store(
        &self,
        state: &mut State,
        flight: &Flight,
        outcome_of_row: impl Fn(&FlightRow) -> Outcome,
        error: Option<&str>,
    ) {
        let mut settlements = Vec::with_capacity(flight.rows.len());
        let mut followers = Vec::new();
        for row in &flight.rows {
            let Some(item) = flight.request.items.get(row.position) else {
                continue;
            };
            let outcome = outcome_of_row(row);
            let bytes = if outcome == Outcome::Ok {
                count(item.row_bytes)
            } else {
                0
            };
            settlements.push(Settlement {
                position: row.position,
                outcome,
                bytes,
                busy: false,
            });
            for (request, position) in state.end_writing(item.fingerprint, row.counter) {
                let outcome = if outcome == Outcome::Ok {
                    Outcome::Present
                } else {
                    outcome
                };
                followers.push((request, Settlement::plain(position, outcome)));
            }
        }
        self.settle(state, &flight.request, &settlements, error);
        for (request, settlement) in followers {
            self.settle(state, &request, &[settlement], error);
        }
    }
}

/// How a store ends that failed with this errno.
pub(super) fn outcome_of(errno: Option<i32>) -> Outcome {
    match errno {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Outcome::NoSpace,
        _ => Outcome::IoError,
    }
}
