//! Loads: planned by the caller's thread, verified by the engine's.

use crate::error::Result;
use crate::eviction::EntryId;
use crate::io::{Completion, Direction, Failure};
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::metrics::count;
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::landing::{Verdict, settlement};
use crate::tier::plan;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};
use crate::tier::waiters::Waiter;

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
        self.around
            .metrics
            .offer(JobKind::Load, request.items.len());
        if request.items.is_empty() {
            return Ok(());
        }
        let open = state.load_bytes_open;
        let bytes = request.bytes();
        state.load_bytes_open = open.saturating_add(bytes);
        if self.is_engine_poisoned() {
            self.settle_rest(&mut state, &request, 0, Outcome::Miss, "poisoned");
            return Ok(());
        }
        if open > 0 && open.saturating_add(bytes) > count(self.around.arena.length()) {
            self.refuse_excess(&mut state, &request);
            return Ok(());
        }
        if self.refuses(Direction::Read) {
            self.refuse_load(&mut state, &request);
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

    /// Ends a load that no caller who leaves the slots of running jobs alone could have asked for:
    /// the slots of all loads together are longer than the arena.
    fn refuse_excess(&self, state: &mut State, request: &Arc<Request>) {
        let refused = &self.around.metrics.refused_loads;
        refused.add(count(request.items.len()));
        let reason = "too many bytes are being loaded";
        self.settle_rest(state, request, 0, Outcome::Miss, reason);
    }

    /// Finds the rows of a load, whose one access is counted here. Rows that are being read are
    /// waited for; the others are pinned, to be read.
    fn pin_rows(
        &self,
        state: &mut State,
        request: &Arc<Request>,
    ) -> (Vec<FlightRow>, Vec<Settlement>) {
        let metrics = &self.around.metrics;
        let (mut rows, mut misses) = (Vec::new(), Vec::new());
        let mut accessed: Vec<EntryId> = Vec::with_capacity(request.items.len());
        let readable = state.readable();
        for (position, item) in request.items.iter().enumerate() {
            let found = state.inventory.index.find(item.fingerprint);
            let entry = found.and_then(|id| Some((id, *state.inventory.index.get(id)?)));
            let Some((id, entry)) = entry.filter(|_| readable) else {
                if entry.is_some() && !state.reset_failed {
                    metrics.refused_loads.add(1);
                }
                misses.push(Settlement::plain(position, Outcome::Miss));
                continue;
            };
            accessed.push(id);
            if state.waiters.join(id, request, position) {
                metrics.coalesced_loads.add(1);
                continue;
            }
            state.waiters.begin(id);
            state.inventory.pin(id);
            rows.push(FlightRow {
                position,
                place: entry.place,
                entry: Some(id),
                checksum: entry.checksum,
                store_order: entry.store_order,
                counter: 0,
            });
        }
        state.inventory.policy.set_time(self.milliseconds());
        state
            .inventory
            .access(&accessed, self.around.clock.unix_seconds());
        (rows, misses)
    }

    /// Takes a read operation back: verifies each row, splits a failed run, settles the rest.
    pub(super) fn complete_load(&self, flight: Flight, completion: &Completion) {
        let (buffer, stuck) = (flight.buffer.clone(), flight.abandoned);
        self.land(flight, completion);
        if let Some(buffer) = buffer {
            let mut state = lock(&self.state);
            if let Some(buffers) = &mut state.buffers {
                buffers.take_back(buffer.memory, stuck);
            }
            let operations = self.launch_waiting(&mut state);
            drop(state);
            self.submit(operations);
        }
    }

    fn land(&self, flight: Flight, completion: &Completion) {
        if flight.abandoned {
            // Its keys have their outcomes, and its slots may be another's from now on: nothing of
            // them is looked at.
            self.end_load(&mut lock(&self.state), &flight, &[], None);
            return;
        }
        match &completion.result {
            Ok(()) => {
                self.health.succeed(Direction::Read);
                self.settle_read(&flight);
            }
            Err(failure @ (Failure::TimedOut | Failure::Closed)) => {
                if *failure == Failure::TimedOut {
                    self.note_late(&flight.request);
                }
                self.settle_failed_load(&flight, Outcome::Timeout, &failure.to_string());
            }
            Err(failure) => {
                self.flight_failed(&flight, *failure);
                // One bad row costs its neighbours nothing: each is read again alone. Not where
                // everything fails.
                if flight.rows.len() > 1 && !self.health.refuses(Direction::Read) {
                    self.split_load(flight);
                } else {
                    self.settle_read_failure(&flight, *failure);
                }
            }
        }
    }

    fn split_load(&self, flight: Flight) {
        let mut state = lock(&self.state);
        let alone = flight.rows.into_iter().map(|row| vec![row]).collect();
        let operations = self.launch(&mut state, &flight.request, alone, flight.epoch);
        state.landing = state.landing.saturating_sub(usize::from(flight.landing));
        drop(state);
        self.submit(operations);
    }

    /// Settles rows that were read, and with them whoever waits for them.
    fn settle_read(&self, flight: &Flight) {
        // What was read to is this flight's own: it is verified without the lock.
        let mut verdicts = self.verify_rows(flight);
        let mut state = lock(&self.state);
        // From here on nobody joins these reads, and no deadline ends those who did.
        let waiters: Vec<Vec<Waiter>> = flight
            .rows
            .iter()
            .map(|row| {
                row.entry
                    .map_or_else(Vec::new, |row| state.waiters.end(row))
            })
            .collect();
        let current = flight.epoch == state.epoch;
        let to_copy = flight.buffer.is_some() || waiters.iter().any(|of_row| !of_row.is_empty());
        let (mut served, mut missed) = if current && to_copy {
            drop(state);
            let handed_out = self.hand_out(flight, &mut verdicts, waiters);
            state = lock(&self.state);
            handed_out
        } else {
            (Vec::new(), waiters.into_iter().flatten().collect())
        };
        let current = flight.epoch == state.epoch;
        if !current {
            missed.append(&mut served);
        }
        let mut settlements = Vec::with_capacity(flight.rows.len());
        for (row, verdict) in flight.rows.iter().zip(&verdicts) {
            let outcome = match verdict {
                Verdict::Good if current => Outcome::Ok,
                Verdict::Corrupt if current => Outcome::Corrupt,
                Verdict::Good | Verdict::Corrupt | Verdict::Replaced => Outcome::Miss,
            };
            match (verdict, row.entry) {
                (Verdict::Corrupt, _) => self.quarantine(&mut state, row),
                (Verdict::Replaced, Some(entry)) => state.drop_entry(entry),
                (Verdict::Replaced, None) | (Verdict::Good, _) => {}
            }
            settlements.push(settlement(&flight.request, row.position, outcome));
        }
        let corrupt = settlements
            .iter()
            .any(|settled| settled.outcome == Outcome::Corrupt);
        let error = corrupt.then_some("a row's bytes are not those that were stored");
        self.end_load(&mut state, flight, &settlements, error);
        self.settle_waiters(&mut state, served, Outcome::Ok, None);
        let why = Some("the read that was waited for failed");
        self.settle_waiters(&mut state, missed, Outcome::Miss, why);
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
            } else if is_device_error(failure) && !self.health.refuses(Direction::Read) {
                state.inventory.retire_row(place);
                self.around.metrics.retired_rows.add(1);
            }
        }
        drop(state);
        self.around.metrics.errors.add(1);
        let text = self.failure_text("load failed", flight, failure);
        self.say_failed("load", failure, &text);
        self.settle_failed_load(flight, outcome, &text);
        // The writer gives lost files back.
        self.work.notify_one();
    }

    /// Ends a load whose rows were not read: from now on they are misses. Where reads are given up
    /// everything is a miss anyway, and the rows may be as good as ever afterwards: they stay.
    pub(super) fn settle_failed_load(&self, flight: &Flight, outcome: Outcome, error: &str) {
        let mut state = lock(&self.state);
        if !self.health.refuses(Direction::Read) {
            for entry in flight.rows.iter().filter_map(|row| row.entry) {
                state.drop_entry(entry);
            }
        }
        let outcome = if flight.epoch == state.epoch {
            outcome
        } else {
            Outcome::Miss
        };
        self.end_missed_load(&mut state, flight, outcome, error);
    }

    /// Ends a load whose rows were not read; whoever waits for them has missed them.
    pub(super) fn end_missed_load(
        &self,
        state: &mut State,
        flight: &Flight,
        outcome: Outcome,
        error: &str,
    ) {
        let entries = flight.rows.iter().filter_map(|row| row.entry);
        let waiters = entries.flat_map(|row| state.waiters.end(row)).collect();
        let settlements: Vec<_> = flight
            .rows
            .iter()
            .map(|row| Settlement::plain(row.position, outcome))
            .collect();
        self.end_load(state, flight, &settlements, Some(error));
        self.settle_waiters(state, waiters, Outcome::Miss, Some(error));
    }

    fn end_load(
        &self,
        state: &mut State,
        flight: &Flight,
        settlements: &[Settlement],
        error: Option<&str>,
    ) {
        state.landing = state.landing.saturating_sub(usize::from(flight.landing));
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
}

/// Whether the device itself failed: the place is not to be trusted again.
pub(super) const fn is_device_error(failure: Failure) -> bool {
    matches!(
        failure,
        Failure::Os(libc::EIO | libc::ENXIO | libc::EUCLEAN | libc::EREMOTEIO)
    )
}
