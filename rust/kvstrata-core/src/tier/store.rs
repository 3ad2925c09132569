//! Stores: queued by the caller's thread, planned by the writer thread.

use crate::error::Result;
use crate::eviction::Class;
use crate::format::checksum::row_checksum;
use crate::index::RowPlace;
use crate::io::{Completion, Failure};
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::{DiskTier, count, plain};
use crate::tier::load::is_device_error;
use crate::tier::plan;
use crate::tier::removals::StoreNumber;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, QueuedStore, State};

/// Keys of a job that are planned at a time: bounds how long the lock is held.
const CHUNK_KEYS: usize = 256;

/// Keys of one chunk that need rows, by class.
type Needs = Vec<(Class, Vec<usize>)>;

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
        let watch = state.watch(&request);
        let epoch = state.epoch;
        let number = state.removals.ask();
        state.queued.push_back(QueuedStore {
            request,
            next: 0,
            epoch,
            number,
            first_order: None,
        });
        drop(state);
        self.work.notify_one();
        if watch {
            self.watch.notify_one();
        }
        Ok(())
    }

    /// Plans the next keys of a queued store; returns it if more are left.
    pub(super) fn plan_store(&self, mut store: QueuedStore) -> Option<QueuedStore> {
        let request = Arc::clone(&store.request);
        let mut state = lock(&self.state);
        if state.epoch != store.epoch || state.reset_failed {
            self.settle_rest(&mut state, &request, store.next, Outcome::Dropped, "reset");
            return None;
        }
        let first_order = *store.first_order.get_or_insert(state.next_store_order);
        let end = store
            .next
            .saturating_add(CHUNK_KEYS)
            .min(request.items.len());
        let needs = self.sort_keys(&mut state, &request, store.next..end, store.number);
        drop(state);
        for (class, positions) in needs {
            let places = self.acquire_rows(class, positions.len(), first_order);
            let (with, without) = positions.split_at(places.len().min(positions.len()));
            if !without.is_empty() {
                let settlements: Vec<_> = without
                    .iter()
                    .map(|at| plain(*at, Outcome::NoSpace))
                    .collect();
                let mut state = lock(&self.state);
                self.settle(
                    &mut state,
                    &request,
                    &settlements,
                    Some("no space could be made"),
                );
            }
            let places = self.prepare_rows(&request, with, places);
            self.write_rows(&store, places);
        }
        store.next = end;
        (end < request.items.len()).then_some(store)
    }

    /// Settles keys that are there or were removed, joins those being stored, and says which need rows.
    fn sort_keys(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        positions: core::ops::Range<usize>,
        number: StoreNumber,
    ) -> Needs {
        let mut settled = Vec::new();
        let mut needs = Needs::new();
        for position in positions {
            let Some(item) = request.items.get(position) else {
                continue;
            };
            if state.removals.cancel(item.fingerprint, number) {
                settled.push(plain(position, Outcome::Dropped));
            } else if state.inventory.index.find(item.fingerprint).is_some() {
                settled.push(plain(position, Outcome::Present));
            } else if let Some(writing) = state.writing.get_mut(&item.fingerprint)
                && !writing.cancelled
            {
                writing.followers.push((Arc::clone(request), position));
            } else if let Some((class, _)) = self.groups.get(&item.key.group()) {
                match needs.iter_mut().find(|(of, _)| of == class) {
                    Some((_, positions)) => positions.push(position),
                    None => needs.push((*class, vec![position])),
                }
            }
        }
        self.settle(state, request, &settled, None);
        needs
    }

    /// Makes rows safe to overwrite: incarnations raised, old entries cleared. Keys whose rows
    /// cannot be made so are settled here.
    fn prepare_rows(
        &self,
        request: &Arc<Request>,
        positions: &[usize],
        places: Vec<RowPlace>,
    ) -> Vec<(usize, RowPlace)> {
        let mut pairs: Vec<(usize, RowPlace)> = positions.iter().copied().zip(places).collect();
        // Stable: neighbours in the job stay neighbours in the file.
        let mut ready = Vec::with_capacity(pairs.len());
        while let Some((_, first)) = pairs.first().copied() {
            let (own, others): (Vec<_>, Vec<_>) = pairs
                .into_iter()
                .partition(|(_, place)| place.container == first.container);
            pairs = others;
            match self.clear_for_writing(&own) {
                Ok(()) => ready.extend(own),
                Err(error) => self.give_up_rows(request, &own, &error),
            }
        }
        ready
    }

    fn clear_for_writing(&self, pairs: &[(usize, RowPlace)]) -> std::io::Result<()> {
        let Some((_, first)) = pairs.first() else {
            return Ok(());
        };
        let state = lock(&self.state);
        let Some(container) = state.inventory.container(first.container) else {
            return Err(std::io::Error::other("the row file is gone"));
        };
        let row_file = Arc::clone(&container.row_file);
        let uncleared: Vec<u32> = pairs
            .iter()
            .map(|(_, place)| place.row)
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

    fn give_up_rows(
        &self,
        request: &Arc<Request>,
        pairs: &[(usize, RowPlace)],
        error: &std::io::Error,
    ) {
        self.store_error(error);
        let mut state = lock(&self.state);
        let gone = error.raw_os_error() == Some(libc::ENOENT);
        for (_, place) in pairs {
            if gone && state.inventory.lose_container(place.container) > 0 {
                self.around.metrics.lost_files.add(1);
            }
            // The old entry may still be there: the row is not used again.
            state.inventory.retire_row(*place);
            self.around.metrics.retired_rows.add(1);
        }
        let outcome = outcome_of(error.raw_os_error());
        let settlements: Vec<_> = pairs.iter().map(|(at, _)| plain(*at, outcome)).collect();
        self.settle(&mut state, request, &settlements, Some(&error.to_string()));
    }

    fn store_error(&self, error: &std::io::Error) {
        self.around.metrics.errors.add(1);
        self.around
            .notices
            .say(Level::Warning, "store", || format!("store failed: {error}"));
    }

    /// Hands the writes of prepared rows to the engine.
    fn write_rows(&self, store: &QueuedStore, places: Vec<(usize, RowPlace)>) {
        let request = &store.request;
        let checksums: Vec<_> = places
            .iter()
            .map(|(position, _)| {
                let item = request.items.get(*position)?;
                let payload = self.around.arena.bytes(item.offset, item.row_bytes)?;
                Some(row_checksum(&self.digest, &item.key, payload))
            })
            .collect();
        let mut state = lock(&self.state);
        let mut rows = Vec::with_capacity(places.len());
        for ((position, place), checksum) in places.into_iter().zip(checksums) {
            let (Some(checksum), Some(item)) = (checksum, request.items.get(position)) else {
                continue;
            };
            let store_order = state.next_store_order;
            state.next_store_order = store_order.saturating_add(1);
            let counter = state.next_counter;
            state.next_counter = counter.saturating_add(1);
            state.begin_writing(item.fingerprint, counter, store.number);
            rows.push(FlightRow {
                position,
                place,
                entry: None,
                checksum,
                store_order,
                counter,
            });
        }
        let runs = plan::runs(rows, &state.inventory);
        let operations = self.launch(&mut state, request, runs, store.epoch);
        drop(state);
        self.submit(operations);
    }

    /// Takes a write operation back: its entries are next, or its rows are free again.
    pub(super) fn complete_store(&self, flight: Flight, completion: &Completion) {
        match &completion.result {
            Ok(()) => {
                let mut state = lock(&self.state);
                if self.is_poisoned() {
                    // Nobody writes entries any more: the rows hold nothing.
                    self.end_store(&mut state, &flight, |_| Outcome::Dropped, Some("poisoned"));
                    return;
                }
                state.written.push(flight);
                drop(state);
                self.work.notify_one();
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
        let retire = is_device_error(failure);
        // A file without its name, or cut, takes no more rows.
        let gone = matches!(failure, Failure::Os(libc::ENOENT) | Failure::Short);
        let text = format!("store failed: {failure}");
        self.around.metrics.errors.add(1);
        self.around
            .notices
            .say(Level::Warning, "store", || text.clone());
        let mut state = lock(&self.state);
        for row in &flight.rows {
            if gone && state.inventory.lose_container(row.place.container) > 0 {
                self.around.metrics.lost_files.add(1);
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
                followers.push((request, plain(position, outcome)));
            }
        }
        self.settle(state, &flight.request, &settlements, error);
        for (request, settlement) in followers {
            self.settle(state, &request, &[settlement], error);
        }
    }
}

/// How a store ends that failed with this errno.
fn outcome_of(errno: Option<i32>) -> Outcome {
    match errno {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Outcome::NoSpace,
        _ => Outcome::IoError,
    }
}
