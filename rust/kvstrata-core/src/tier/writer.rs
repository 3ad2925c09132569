//! The writer thread: space, plans of stores, the row table.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::format::row_table::{Generation, RowEntry};
use crate::index::RowPlace;
use crate::job::Outcome;
use crate::notice::Level;
use crate::sys::sync::{Arc, atomic::Ordering, lock, wait};
use crate::tier::disk::{DiskTier, plain};
use crate::tier::inventory::NewRow;
use crate::tier::request::Request;
use crate::tier::rows::RowUse;
use crate::tier::state::{Flight, FlightRow, Phase, QueuedStore, State};

/// What the writer does next.
#[derive(Debug)]
enum Work {
    /// Rows are written: write their entries.
    Entries(Vec<Flight>),
    /// Rows are free for good: clear their entries.
    Clears(Vec<RowPlace>),
    /// A store waits to be planned.
    Plan(QueuedStore),
    /// The tier is closing and nothing is left.
    Stop,
}

impl DiskTier {
    /// Body of the writer thread.
    pub(super) fn write_loop(&self) {
        let ended = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let work = self.next_work();
                self.give_back_lost_files();
                match work {
                    Work::Entries(flights) => self.write_entries(flights),
                    Work::Clears(places) => self.clear_rows(&places),
                    Work::Plan(store) => self.plan_or_requeue(store),
                    Work::Stop => break,
                }
            }
            self.flush();
        }));
        if ended.is_err() {
            self.poison();
        }
        lock(&self.state).writer_done = true;
        self.done.notify_all();
    }

    fn next_work(&self) -> Work {
        let mut state = lock(&self.state);
        state.entering.clear();
        loop {
            if !state.written.is_empty() {
                let written = core::mem::take(&mut state.written);
                state.entering = written
                    .iter()
                    .map(|flight| Arc::clone(&flight.request))
                    .collect();
                return Work::Entries(written);
            }
            if !state.clears.is_empty() {
                return Work::Clears(core::mem::take(&mut state.clears));
            }
            if let Some(store) = state.queued.pop_front() {
                state.planning = Some(Arc::clone(&store.request));
                return Work::Plan(store);
            }
            if state.phase == Phase::Stopping && state.flights.is_empty() {
                return Work::Stop;
            }
            state = wait(&self.work, state);
        }
    }

    fn plan_or_requeue(&self, store: QueuedStore) {
        let rest = self.plan_store(store);
        let mut state = lock(&self.state);
        state.planning = None;
        // At the front: stores are planned in the order they were asked.
        if let Some(rest) = rest {
            state.queued.push_front(rest);
        }
        if state.queued.is_empty() {
            state.removals.clear();
        }
    }

    /// Writes the entries of written rows, file by file, and lists the rows.
    fn write_entries(&self, mut flights: Vec<Flight>) {
        flights.sort_by_key(|flight| flight.rows.first().map(|row| row.place));
        let same_file = |a: &Flight, b: &Flight| {
            a.rows.first().map(|row| row.place.container)
                == b.rows.first().map(|row| row.place.container)
        };
        for group in flights.chunk_by(same_file) {
            self.write_entries_of_file(group);
        }
    }

    fn write_entries_of_file(&self, flights: &[Flight]) {
        let now = self.around.clock.unix_seconds();
        let state = lock(&self.state);
        let first = flights.iter().flat_map(|flight| &flight.rows).next();
        let row_file = first
            .and_then(|row| state.inventory.row_file(row.place))
            .map(Arc::clone);
        // What was removed or reset meanwhile gets no entry at all.
        let listable: Vec<(&Flight, &FlightRow)> = flights
            .iter()
            .flat_map(|flight| flight.rows.iter().map(move |row| (flight, row)))
            .filter(|(flight, row)| may_list(&state, flight, row))
            .collect();
        drop(state);
        let Some(row_file) = row_file else {
            return;
        };
        let incarnation = row_file.incarnation();
        let entries: Vec<(u32, RowEntry)> = listable
            .iter()
            .filter_map(|(flight, row)| {
                let item = flight.request.items.get(row.position)?;
                Some((
                    row.place.row,
                    RowEntry {
                        key: item.key,
                        generation: Generation {
                            incarnation,
                            counter: row.counter,
                        },
                        epoch: flight.epoch,
                        payload_bytes: u32::try_from(item.row_bytes).ok()?,
                        store_order: row.store_order,
                        access_time: now,
                        checksum: row.checksum.to_field(),
                    },
                ))
            })
            .collect();
        let written = row_file.write_entries(&entries);
        if let Err(error) = &written {
            self.around.metrics.errors.add(1);
            self.around.notices.say(Level::Warning, "table", || {
                format!(
                    "the row table of {} cannot be written: {error}",
                    row_file.path().display()
                )
            });
        }
        let had_entry: Vec<u64> = listable.iter().map(|(_, row)| row.counter).collect();
        for flight in flights {
            self.list_rows(flight, &had_entry, written.as_ref().err(), now);
        }
    }

    /// Lists the rows of a flight, the tail first, and settles its keys.
    fn list_rows(
        &self,
        flight: &Flight,
        had_entry: &[u64],
        error: Option<&std::io::Error>,
        now: u32,
    ) {
        let mut state = lock(&self.state);
        let mut failed = Vec::new();
        for row in flight.rows.iter().rev() {
            let Some(item) = flight.request.items.get(row.position) else {
                continue;
            };
            let on_disk = had_entry.contains(&row.counter);
            if !on_disk || error.is_some() || !may_list(&state, flight, row) {
                failed.push(row.counter);
                if on_disk && error.is_some() {
                    // The entry may be there or not: the row is not used again.
                    state.inventory.retire_row(row.place);
                } else {
                    state.inventory.free_row(row.place, on_disk);
                }
                if on_disk {
                    state.clears.push(row.place);
                }
                continue;
            }
            let listed = state.inventory.publish(NewRow {
                fingerprint: item.fingerprint,
                place: row.place,
                checksum: row.checksum,
                store_order: row.store_order,
                access_time: now,
            });
            match listed {
                Some(entry) => flight.request.remember(row.position, entry),
                None => failed.push(row.counter),
            }
        }
        let why = error.map(ToString::to_string);
        let outcome = if error.is_some() {
            Outcome::IoError
        } else {
            Outcome::Dropped
        };
        self.end_store(
            &mut state,
            flight,
            |row| {
                if failed.contains(&row.counter) {
                    outcome
                } else {
                    Outcome::Ok
                }
            },
            why.as_deref(),
        );
    }

    /// Clears the entries of rows that hold nothing any more.
    fn clear_rows(&self, places: &[RowPlace]) {
        let mut sorted = places.to_vec();
        sorted.sort_unstable();
        for group in sorted.chunk_by(|a, b| a.container == b.container) {
            let Some(first) = group.first() else {
                continue;
            };
            let mut state = lock(&self.state);
            let Some(container) = state.inventory.container_mut(first.container) else {
                continue;
            };
            let mut rows: Vec<u32> = Vec::with_capacity(group.len());
            for place in group {
                let used = container.rows.get(place.row);
                if container.rows.is_stale(place.row)
                    && matches!(used, RowUse::Free | RowUse::Retired)
                {
                    container.rows.set(place.row, RowUse::Reserved);
                    rows.push(place.row);
                }
            }
            let row_file = Arc::clone(&container.row_file);
            drop(state);
            let cleared = row_file
                .raise_incarnation(self.writer)
                .and_then(|()| row_file.clear_entries(&rows));
            let mut state = lock(&self.state);
            if let Some(container) = state.inventory.container_mut(first.container) {
                for row in rows {
                    container.rows.set_stale(row, cleared.is_err());
                    container.rows.set(row, RowUse::Free);
                }
            }
        }
    }

    /// Writes down what a restart should know: access times, cleared rows, clean marks.
    fn flush(&self) {
        let state = lock(&self.state);
        let mut dirty: Vec<(RowPlace, u32)> = state
            .inventory
            .index
            .listed()
            .filter_map(|id| state.inventory.index.get(id))
            .filter(|entry| entry.access_dirty)
            .map(|entry| (entry.place, entry.access_time))
            .collect();
        let files: Vec<_> = state
            .inventory
            .containers()
            .filter(|(_, container)| !container.lost)
            .map(|(id, container)| (id, Arc::clone(&container.row_file)))
            .collect();
        let store_order = state.next_store_order.saturating_sub(1);
        drop(state);
        dirty.sort_unstable();
        for (id, row_file) in files {
            let from = dirty.partition_point(|(place, _)| place.container < id);
            let to = dirty.partition_point(|(place, _)| place.container <= id);
            let own = dirty.get(from..to).unwrap_or(&[]);
            let done = row_file
                .write_access_times(own, self.writer)
                .and_then(|()| row_file.mark_clean(store_order));
            if let Err(error) = done {
                self.around.metrics.errors.add(1);
                self.around.notices.say(Level::Warning, "flush", || {
                    format!(
                        "{} was not closed cleanly: {error}",
                        row_file.path().display()
                    )
                });
            }
        }
    }

    /// The writer thread panicked: from now on nothing is stored; loads go on.
    fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Error, "poisoned", || {
            "the writer thread ended by a panic: nothing is stored any more".to_owned()
        });
        let mut state = lock(&self.state);
        let queued: Vec<_> = state.queued.drain(..).map(|store| store.request).collect();
        let written = core::mem::take(&mut state.written);
        for flight in written {
            self.end_store(&mut state, &flight, |_| Outcome::Dropped, Some("poisoned"));
        }
        let planning = state.planning.take();
        let entering = core::mem::take(&mut state.entering);
        for request in queued.iter().chain(&planning).chain(&entering) {
            self.drop_open_keys(&mut state, request);
        }
    }

    /// Gives the keys of a store that nobody will settle any more their outcome: those that have
    /// none and are not with the engine.
    fn drop_open_keys(&self, state: &mut State, request: &Arc<Request>) {
        let mut open = self.around.jobs.open_positions(request.job_id);
        state
            .flights
            .values()
            .filter(|flight| Arc::ptr_eq(&flight.request, request))
            .flat_map(|flight| &flight.rows)
            .for_each(|row| open.retain(|position| *position != row.position));
        let dropped: Vec<_> = open
            .into_iter()
            .map(|position| plain(position, Outcome::Dropped))
            .collect();
        self.settle(state, request, &dropped, Some("poisoned"));
    }
}

/// Whether a written row may still be listed.
fn may_list(state: &State, flight: &Flight, row: &FlightRow) -> bool {
    flight.epoch == state.epoch
        && !state.reset_failed
        && flight
            .request
            .items
            .get(row.position)
            .is_some_and(|item| state.may_list(item.fingerprint, row.counter))
}
