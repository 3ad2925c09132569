//! The writer thread: what it does next, and how it ends.

use core::time::Duration;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::index::RowPlace;
use crate::io::Direction;
use crate::job::{Outcome, Settlement};
use crate::notice::Level;
use crate::sys::sync::{Arc, atomic::Ordering, lock, wait, wait_timeout};
use crate::tier::batch;
use crate::tier::chores::{Chore, Chores};
use crate::tier::disk::DiskTier;
use crate::tier::health::REFUSED;
use crate::tier::last_error::Cause;
use crate::tier::phase::Phase;
use crate::tier::request::Request;
use crate::tier::row_file::RowFile;
use crate::tier::rows::RowUse;
use crate::tier::state::{Flight, QueuedStore, State};
use crate::tier::written::Written;

/// Bytes in the engine below which stores are planned before anything else.
const ENGINE_BYTES_LOW: u64 = 64 << 20;
/// How long a written row waits at most for others before its entry is written.
const ENTRIES_DELAY_MAX: Duration = Duration::from_millis(5);

/// What the writer does next.
#[derive(Debug)]
enum Work {
    /// Rows are written: write their entries.
    Entries(Vec<Flight>),
    /// Rows are free for good: clear their entries.
    Clears(Vec<RowPlace>),
    /// Stores wait to be planned.
    Plan(Vec<QueuedStore>),
    /// A device that was given up is to be tried.
    Trial,
    /// Something beside stores is due.
    Chore(Chore),
    /// The tier is closing and nothing is left.
    Stop,
}

impl DiskTier {
    /// Body of the writer thread.
    pub(super) fn write_loop(&self) {
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let mut has_planned = false;
            let mut chores = Chores::new(self.around.clock.now());
            loop {
                let work = self.next_work(has_planned, &mut chores);
                has_planned = matches!(work, Work::Plan(_));
                if !self.health.refuses(Direction::Write) {
                    self.give_back_lost_files();
                }
                match work {
                    Work::Trial => self.do_trial_work(),
                    Work::Entries(flights) => self.write_entries(flights),
                    Work::Clears(places) => self.clear_rows(&places),
                    Work::Plan(stores) => {
                        self.plan_or_requeue(stores);
                        chores.planned(self);
                    }
                    Work::Chore(chore) => chores.run(self, chore),
                    Work::Stop => break,
                }
            }
            self.flush();
            self.remove_last_trial();
        }));
        if ended.is_err() {
            self.poison();
        }
        lock(&self.state).writer_done = true;
        self.done.notify_all();
    }

    /// What is to be done next; sleeps while there is nothing.
    ///
    /// Entries that a job waits for go before stores that wait to be planned, unless the engine
    /// is about to run out of work (not twice in a row).
    fn next_work(&self, has_planned: bool, chores: &mut Chores) -> Work {
        let mut state = lock(&self.state);
        state.entering.clear();
        let mut has_waited = false;
        loop {
            let is_stopping = state.phase == Phase::Stopping;
            let feeds_engine = !has_planned
                && !state.queued.is_empty()
                && state.store_bytes_in_engine < ENGINE_BYTES_LOW;
            let writes_entries = state.written.is_due() || has_waited || is_stopping;
            if !state.written.is_empty() && writes_entries && !feeds_engine {
                let written = state.written.take();
                state.entering = Written::requests(&written);
                return Work::Entries(written);
            }
            if self.has_trial_work() {
                return Work::Trial;
            }
            if !state.clears.is_empty() {
                return Work::Clears(core::mem::take(&mut state.clears));
            }
            if !is_stopping && let Some(chore) = chores.take_due(self, &state) {
                return Work::Chore(chore);
            }
            if !state.queued.is_empty() {
                return Work::Plan(take_batch(&mut state));
            }
            let in_engine = state.flights.values().any(Flight::uses_slots);
            if is_stopping && !in_engine && state.written.is_empty() {
                return Work::Stop;
            }
            has_waited = !state.written.is_empty();
            let pause = if has_waited {
                Some(ENTRIES_DELAY_MAX)
            } else {
                chores.sleep(self).filter(|_| !is_stopping)
            };
            state = match pause {
                Some(pause) => wait_timeout(&self.work, state, pause),
                None => wait(&self.work, state),
            };
        }
    }

    fn plan_or_requeue(&self, stores: Vec<QueuedStore>) {
        let rest = self.plan_stores(stores);
        let mut state = lock(&self.state);
        state.planning.clear();
        // At the front: stores are planned in the order they were asked.
        for store in rest.into_iter().rev() {
            state.queued.push_front(store);
        }
        if state.queued.is_empty() {
            state.removals.clear();
        }
        self.end_planning(state);
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
            let cleared = self.clear_entries(&row_file, &rows);
            let mut state = lock(&self.state);
            if let Some(container) = state.inventory.container_mut(first.container) {
                for row in rows {
                    container.rows.set_stale(row, cleared.is_err());
                    container.rows.set(row, RowUse::Free);
                }
            }
        }
    }

    /// Clears entries on disk. While writes are given up they are left for whoever uses the rows.
    fn clear_entries(&self, row_file: &RowFile, rows: &[u32]) -> std::io::Result<()> {
        if self.health.refuses(Direction::Write) {
            return Err(std::io::Error::other(REFUSED));
        }
        let cleared = row_file
            .raise_incarnation(self.writer)
            .and_then(|()| row_file.clear_entries(rows));
        if let Err(error) = &cleared {
            let operation = "write to the row table";
            self.device_failed(
                Direction::Write,
                Cause::of(error),
                operation,
                &row_file.path(),
            );
        }
        cleared
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
        state.let_all_go();
        let written = state.written.take();
        for flight in written {
            self.end_store(&mut state, &flight, |_| Outcome::Dropped, Some("poisoned"));
        }
        let planning = core::mem::take(&mut state.planning);
        let entering = core::mem::take(&mut state.entering);
        for request in queued.iter().chain(&planning).chain(&entering) {
            self.end_open_keys(&mut state, request, Outcome::Dropped, "poisoned");
        }
    }

    /// Gives the keys of a store that nobody will settle any more their outcome: those that have
    /// none and are not with the engine.
    pub(super) fn end_open_keys(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        outcome: Outcome,
        why: &str,
    ) {
        let in_engine: HashSet<usize> = state
            .flights
            .values()
            .filter(|flight| Arc::ptr_eq(&flight.request, request))
            .flat_map(|flight| flight.rows.iter().map(|row| row.position))
            .collect();
        let open = self.around.jobs.open_positions(request.job_id);
        let ended: Vec<_> = open
            .into_iter()
            .filter(|position| !in_engine.contains(position))
            .map(|position| Settlement::plain(position, outcome))
            .collect();
        self.settle(state, request, &ended, Some(why));
    }
}

/// Takes stores off the queue, as many as are planned together: one of which some keys were
/// planned before alone, others until they are enough.
fn take_batch(state: &mut State) -> Vec<QueuedStore> {
    let mut batch = Vec::new();
    let (mut keys, mut bytes, mut is_begun) = (0_usize, 0_u64, false);
    while keys < batch::KEYS_MAX
        && bytes < batch::BYTES_MAX
        && !is_begun
        && let Some(store) = state.queued.pop_front()
    {
        is_begun = store.is_begun;
        keys = keys.saturating_add(store.request.items.len());
        bytes = bytes.saturating_add(store.request.bytes());
        state.planning.push(Arc::clone(&store.request));
        batch.push(store);
    }
    batch
}
