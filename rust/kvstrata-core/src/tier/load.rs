//! Loads: planned by the caller's thread, verified by the engine's.

use crate::error::Result;
use crate::eviction::EntryId;
use crate::format::checksum::row_checksum;
use crate::io::{Completion, Failure};
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::{DiskTier, count, plain};
use crate::tier::plan;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};

/// What a verified or failed row came to, and whether its row may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Good,
    Mismatch,
}

impl DiskTier {
    /// Begins a load: each row found is pinned and read to its slot; returns at once.
    ///
    /// # Errors
    /// `Argument` for a wrong argument, `Closed` after close; then nothing was begun.
    pub(crate) fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        let items = self.items(keys, offsets)?;
        let deadline = self.around.clock.now().checked_add(self.deadline);
        let mut state = self.open_state()?;
        let now = self.around.clock.now();
        let request = Arc::new(Request::new(
            job_id,
            JobKind::Load,
            items,
            deadline.unwrap_or(now),
        ));
        self.around
            .jobs
            .begin(job_id, JobKind::Load, request.items.len())?;
        if request.items.is_empty() {
            return Ok(());
        }
        let watch = state.watch(&request);
        let (rows, misses) = self.pin_rows(&mut state, &request);
        self.settle(&mut state, &request, &misses, None);
        let (runs, epoch) = (plan::runs(rows, &state.inventory), state.epoch);
        let operations = self.launch(&mut state, &request, runs, epoch);
        drop(state);
        if watch {
            self.watch.notify_one();
        }
        self.submit(operations);
        Ok(())
    }

    /// Finds and pins the rows of a load; their one access is counted here.
    fn pin_rows(&self, state: &mut State, request: &Request) -> (Vec<FlightRow>, Vec<Settlement>) {
        let (mut rows, mut misses) = (Vec::new(), Vec::new());
        let mut accessed: Vec<EntryId> = Vec::with_capacity(request.items.len());
        for (position, item) in request.items.iter().enumerate() {
            let found = if state.reset_failed {
                None
            } else {
                state.inventory.index.find(item.fingerprint)
            };
            let entry = found.and_then(|id| Some((id, *state.inventory.index.get(id)?)));
            let Some((id, entry)) = entry else {
                misses.push(plain(position, Outcome::Miss));
                continue;
            };
            state.inventory.pin(id);
            accessed.push(id);
            rows.push(FlightRow {
                position,
                place: entry.place,
                entry: Some(id),
                checksum: entry.checksum,
                store_order: entry.store_order,
                counter: 0,
            });
        }
        state
            .inventory
            .access(&accessed, self.around.clock.unix_seconds());
        (rows, misses)
    }

    /// Takes a read operation back: verifies each row, splits a failed run, settles the rest.
    pub(super) fn complete_load(&self, flight: Flight, completion: &Completion) {
        if flight.abandoned {
            // Its keys have their outcomes, and its slots may be another's from now on: nothing of
            // them is looked at.
            self.end_load(&mut lock(&self.state), &flight, &[], None);
            return;
        }
        match &completion.result {
            Ok(()) => self.settle_read(&flight),
            Err(failure @ (Failure::TimedOut | Failure::Closed)) => {
                self.settle_failed_load(&flight, Outcome::Timeout, &failure.to_string());
            }
            // One bad row costs its neighbours nothing: each is read again alone.
            Err(_) if flight.rows.len() > 1 => self.split_load(flight),
            Err(failure) => self.settle_read_failure(&flight, *failure),
        }
    }

    fn split_load(&self, flight: Flight) {
        let mut state = lock(&self.state);
        let alone = flight.rows.into_iter().map(|row| vec![row]).collect();
        let operations = self.launch(&mut state, &flight.request, alone, flight.epoch);
        drop(state);
        self.submit(operations);
    }

    fn settle_read(&self, flight: &Flight) {
        // The slots are this job's own: they are verified where they lie, without the lock.
        let verdicts: Vec<Verdict> = flight
            .rows
            .iter()
            .map(|row| self.verify(flight, row))
            .collect();
        let changed: Vec<bool> = flight
            .rows
            .iter()
            .zip(&verdicts)
            .map(|(row, verdict)| *verdict == Verdict::Mismatch && self.entry_changed(flight, row))
            .collect();
        let mut state = lock(&self.state);
        let mut settlements = Vec::with_capacity(flight.rows.len());
        let current = flight.epoch == state.epoch;
        for ((row, verdict), changed) in flight.rows.iter().zip(verdicts).zip(changed) {
            let outcome = match verdict {
                Verdict::Good if current => Outcome::Ok,
                Verdict::Mismatch if !changed && current => Outcome::Corrupt,
                Verdict::Good | Verdict::Mismatch => Outcome::Miss,
            };
            if verdict == Verdict::Mismatch {
                self.quarantine(&mut state, row);
            }
            let bytes = match (outcome, flight.request.items.get(row.position)) {
                (Outcome::Ok, Some(item)) => count(item.row_bytes),
                _ => 0,
            };
            settlements.push(Settlement {
                position: row.position,
                outcome,
                bytes,
                busy: false,
            });
        }
        let corrupt = settlements
            .iter()
            .any(|settled| settled.outcome == Outcome::Corrupt);
        let error = corrupt.then_some("a row's bytes are not those that were stored");
        self.end_load(&mut state, flight, &settlements, error);
    }

    /// Compares a row in its slot with its checksum, which covers namespace, key and length.
    fn verify(&self, flight: &Flight, row: &FlightRow) -> Verdict {
        let payload =
            flight.request.items.get(row.position).and_then(|item| {
                Some((item, self.around.arena.bytes(item.offset, item.row_bytes)?))
            });
        match payload {
            Some((item, payload))
                if row_checksum(&self.digest, &item.key, payload) == row.checksum =>
            {
                Verdict::Good
            }
            _ => Verdict::Mismatch,
        }
    }

    /// Whether the entry on disk no longer is the one the row was indexed by.
    fn entry_changed(&self, flight: &Flight, row: &FlightRow) -> bool {
        let Some(item) = flight.request.items.get(row.position) else {
            return true;
        };
        let file = lock(&self.state)
            .inventory
            .row_file(row.place)
            .map(Arc::clone);
        match file.map(|file| file.read_entry(row.place.row)) {
            Some(Ok(Some(entry))) => {
                entry.key != item.key || entry.checksum != row.checksum.to_field()
            }
            Some(Ok(None) | Err(_)) | None => true,
        }
    }

    /// Hides a row with wrong bytes and counts it.
    fn quarantine(&self, state: &mut State, row: &FlightRow) {
        let torn = row.store_order < self.first_store_order
            && state
                .inventory
                .container(row.place.container)
                .and_then(|container| container.torn_after)
                .is_some_and(|mark| row.store_order > mark);
        let metrics = &self.around.metrics;
        if torn {
            metrics.torn_rows.add(1);
        } else {
            metrics.corrupt_rows.add(1);
        }
        self.around.notices.say(Level::Warning, "mismatch", || {
            let what = if torn {
                "was cut short by a crash"
            } else {
                "is corrupt"
            };
            let name = state
                .inventory
                .row_file(row.place)
                .map_or_else(String::new, |file| file.path().display().to_string());
            format!(
                "row {} of {name} {what}; it counts as a miss",
                row.place.row
            )
        });
        if let Some(entry) = row.entry {
            state.drop_entry(entry);
        }
    }

    fn settle_read_failure(&self, flight: &Flight, failure: Failure) {
        let gone = matches!(failure, Failure::Short)
            || matches!(failure, Failure::Os(errno) if errno == libc::ENOENT);
        let outcome = if gone {
            Outcome::Miss
        } else {
            Outcome::IoError
        };
        let place = flight.rows.first().map(|row| row.place);
        let mut state = lock(&self.state);
        if let Some(place) = place {
            if gone {
                if state.inventory.lose_container(place.container) > 0 {
                    self.around.metrics.lost_files.add(1);
                }
            } else if is_device_error(failure) {
                state.inventory.retire_row(place);
                self.around.metrics.retired_rows.add(1);
            }
        }
        drop(state);
        self.around.metrics.errors.add(1);
        let text = format!("load failed: {failure}");
        self.around
            .notices
            .say(Level::Warning, "load", || text.clone());
        self.settle_failed_load(flight, outcome, &text);
        // The writer gives lost files back.
        self.work.notify_one();
    }

    /// Ends a load whose rows were not read: from now on they are misses.
    pub(super) fn settle_failed_load(&self, flight: &Flight, outcome: Outcome, error: &str) {
        let mut state = lock(&self.state);
        for entry in flight.rows.iter().filter_map(|row| row.entry) {
            state.drop_entry(entry);
        }
        let outcome = if flight.epoch == state.epoch {
            outcome
        } else {
            Outcome::Miss
        };
        let settlements: Vec<_> = flight
            .rows
            .iter()
            .map(|row| plain(row.position, outcome))
            .collect();
        self.end_load(&mut state, flight, &settlements, Some(error));
    }

    pub(super) fn end_load(
        &self,
        state: &mut State,
        flight: &Flight,
        settlements: &[Settlement],
        error: Option<&str>,
    ) {
        for entry in flight.rows.iter().filter_map(|row| row.entry) {
            state.unpin(entry);
        }
        if !flight.abandoned {
            self.settle(state, &flight.request, settlements, error);
        }
        if !state.clears.is_empty() {
            self.work.notify_one();
        }
    }

    /// Ends loads at their deadline although the kernel still owns their slots.
    pub(super) fn abandon_loads(&self, request: &Arc<Request>) {
        let mut state = lock(&self.state);
        let mut settlements = Vec::new();
        let mut entries = Vec::new();
        let own = |flight: &&mut Flight| Arc::ptr_eq(&flight.request, request) && !flight.abandoned;
        state.flights.values_mut().filter(own).for_each(|flight| {
            flight.abandoned = true;
            for row in &flight.rows {
                settlements.push(Settlement {
                    position: row.position,
                    outcome: Outcome::Timeout,
                    bytes: 0,
                    busy: true,
                });
                entries.extend(row.entry);
            }
        });
        for entry in entries {
            state.drop_entry(entry);
        }
        let error = "the device did not answer by the deadline";
        self.settle(&mut state, request, &settlements, Some(error));
    }
}

/// Whether the device itself failed: the place is not to be trusted again.
pub(super) const fn is_device_error(failure: Failure) -> bool {
    matches!(
        failure,
        Failure::Os(libc::EIO | libc::ENXIO | libc::EUCLEAN | libc::EREMOTEIO)
    )
}
