//! Planning of stores, several at a time: which keys need rows, which rows they get, what is
//! cleared before those are overwritten, and the hand-over to the engine.
//!
//! A clear, a look for space or a hand-over costs about as much for one row as for hundreds, so
//! jobs that wait are planned together, however small they are.

use std::collections::HashSet;

use crate::eviction::Class;
use crate::format::checksum::RowChecksum;
use crate::index::{Fingerprint, RowPlace};
use crate::io::Direction;
use crate::job::{Outcome, Settlement};
use crate::metrics::count;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::health::REFUSED;
use crate::tier::phase::Phase;
use crate::tier::plan;
use crate::tier::state::{FlightRow, QueuedStore, State};

/// Keys that get rows at a time: bounds how long the lock is held.
pub(super) const KEYS_MAX: usize = 512;
/// Keys that are looked at for that, those that need no row included.
const LOOKS_MAX: usize = 4096;
/// Payload bytes that are planned at a time: bounds how long other rows wait for their entries.
pub(super) const BYTES_MAX: u64 = 32 << 20;
/// Payload bytes that are handed to the engine at a time, or a row: the first ones are under way
/// while the others are handed over, and nobody waits long for the lock.
const HAND_OVER_BYTES: usize = 1 << 20;

/// A key that needs a row.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    /// Which store of the batch it belongs to.
    store: usize,
    /// Its position there.
    position: usize,
    /// Order of the row among all stores.
    store_order: u64,
}

/// A key and the row it gets.
#[derive(Clone, Copy, Debug)]
struct Placed {
    wanted: Wanted,
    place: RowPlace,
}

/// Neighbouring rows.
type Run = Vec<FlightRow>;

/// The keys of a batch that need rows, by class.
#[derive(Debug, Default)]
struct Needs {
    by_class: Vec<(Class, Vec<Wanted>)>,
    seen: HashSet<Fingerprint>,
    bytes: u64,
    looked_at: usize,
}

impl Needs {
    fn is_full(&self) -> bool {
        self.seen.len() >= KEYS_MAX || self.bytes >= BYTES_MAX
    }

    fn push(&mut self, class: Class, wanted: Wanted) {
        match self.by_class.iter_mut().find(|(of, _)| *of == class) {
            Some((_, all)) => all.push(wanted),
            None => self.by_class.push((class, vec![wanted])),
        }
    }
}

impl DiskTier {
    /// Plans the next keys of queued stores; returns those stores of which keys are left. One that
    /// was begun before is planned alone: more rows stay for it than for the others.
    pub(super) fn plan_stores(&self, mut stores: Vec<QueuedStore>) -> Vec<QueuedStore> {
        let needs = self.sort_stores(&mut stores);
        for (class, wanted) in needs.by_class {
            if self.refuses(Direction::Write) {
                let metrics = &self.around.metrics;
                metrics.circuit_dropped_stores.add(count(wanted.len()));
                self.settle_wanted(&stores, &wanted, Outcome::Dropped, REFUSED);
                continue;
            }
            let placed = self.place_rows(&stores, class, &wanted);
            let ready = self.prepare_rows(&stores, placed);
            self.write_rows(&stores, &ready);
        }
        stores.retain(|store| store.next < store.request.items.len());
        stores
    }

    fn sort_stores(&self, stores: &mut [QueuedStore]) -> Needs {
        let mut needs = Needs::default();
        let mut state = lock(&self.state);
        for (number, store) in stores.iter_mut().enumerate() {
            if store.request.is_abandoned() {
                store.next = store.request.items.len();
                continue;
            }
            if state.epoch != store.epoch || state.reset_failed {
                let (request, next) = (Arc::clone(&store.request), store.next);
                self.settle_rest(&mut state, &request, next, Outcome::Dropped, "reset");
                store.next = request.items.len();
                continue;
            }
            if self.refuses(Direction::Write) {
                let (request, next) = (Arc::clone(&store.request), store.next);
                self.refuse_store(&mut state, &request, next);
                store.next = request.items.len();
                continue;
            }
            if !store.is_begun {
                self.note_plan_wait(&store.request);
            }
            state.begin_planning(store);
            if !self.sort_keys(&mut state, number, store, &mut needs) {
                break;
            }
        }
        needs
    }

    /// Settles keys that are there or were removed, joins those being stored, and says which need
    /// rows. False when no more keys go into this batch.
    fn sort_keys(
        &self,
        state: &mut State,
        number: usize,
        store: &mut QueuedStore,
        needs: &mut Needs,
    ) -> bool {
        let request = Arc::clone(&store.request);
        let mut settled = Vec::new();
        let mut goes_on = true;
        while let Some(item) = request.items.get(store.next) {
            let position = store.next;
            if needs.looked_at >= LOOKS_MAX {
                goes_on = false;
                break;
            }
            needs.looked_at = needs.looked_at.saturating_add(1);
            if state.removals.cancel(item.fingerprint, store.number) {
                settled.push(Settlement::plain(position, Outcome::Dropped));
            } else if let Some(entry) = state.inventory.index.find(item.fingerprint) {
                state.keep(entry, store.number);
                settled.push(Settlement::plain(position, Outcome::Present));
            } else if let Some(writing) = state.writing.get_mut(&item.fingerprint)
                && !writing.cancelled
            {
                writing.followers.push((Arc::clone(&request), position));
            } else if !state.inventory.admits(item.fingerprint) {
                self.around.metrics.unadmitted_stores.add(1);
                settled.push(Settlement::plain(position, Outcome::Dropped));
            } else if let Some((class, _)) = self.groups.get(&item.key.group()) {
                // A key that another store of the batch brings is looked at again when that one
                // is being written.
                if needs.is_full() || !needs.seen.insert(item.fingerprint) {
                    goes_on = false;
                    break;
                }
                let store_order = state.next_store_order;
                state.next_store_order = store_order.saturating_add(1);
                needs.bytes = needs.bytes.saturating_add(count(item.row_bytes));
                let wanted = Wanted {
                    store: number,
                    position,
                    store_order,
                };
                needs.push(*class, wanted);
            }
            store.next = store.next.saturating_add(1);
        }
        self.settle(state, &request, &settled, None);
        goes_on
    }

    /// Gives keys rows, in their order; settles those for which there is no space.
    fn place_rows(&self, stores: &[QueuedStore], class: Class, wanted: &[Wanted]) -> Vec<Placed> {
        let rows = self.acquire_rows(class, wanted.len());
        let (with, without) = wanted.split_at(rows.len().min(wanted.len()));
        self.settle_wanted(stores, without, Outcome::NoSpace, "no space could be made");
        let placed = |(wanted, place): (&Wanted, RowPlace)| Placed {
            wanted: *wanted,
            place,
        };
        with.iter().zip(rows).map(placed).collect()
    }

    /// Gives keys that get no row their outcome.
    fn settle_wanted(
        &self,
        stores: &[QueuedStore],
        wanted: &[Wanted],
        outcome: Outcome,
        error: &str,
    ) {
        for own in wanted.chunk_by(|one, other| one.store == other.store) {
            let store = own.first().and_then(|first| stores.get(first.store));
            let settlements: Vec<_> = own
                .iter()
                .map(|wanted| Settlement::plain(wanted.position, outcome))
                .collect();
            if let Some(store) = store {
                let mut state = lock(&self.state);
                self.settle(&mut state, &store.request, &settlements, Some(error));
            }
        }
    }

    /// Makes rows safe to overwrite: incarnations raised, old entries cleared. Keys whose rows
    /// cannot be made so are settled here.
    fn prepare_rows(&self, stores: &[QueuedStore], mut placed: Vec<Placed>) -> Vec<Placed> {
        // Stable: neighbours in a job stay neighbours in the file.
        placed.sort_by_key(|placed| placed.place.container);
        let mut ready = Vec::with_capacity(placed.len());
        for own in placed.chunk_by(|one, other| one.place.container == other.place.container) {
            let rows: Vec<RowPlace> = own.iter().map(|one| one.place).collect();
            match self.clear_for_writing(&rows) {
                Ok(()) => ready.extend_from_slice(own),
                Err(error) => {
                    let outcome = self.give_up_rows(&rows, &error);
                    let wanted: Vec<Wanted> = own.iter().map(|placed| placed.wanted).collect();
                    self.settle_wanted(stores, &wanted, outcome, &error.to_string());
                }
            }
        }
        ready.sort_by_key(|placed| placed.wanted.store);
        ready
    }

    /// Hands the writes of prepared rows to the engine.
    fn write_rows(&self, stores: &[QueuedStore], ready: &[Placed]) {
        for own in ready.chunk_by(|one, other| one.wanted.store == other.wanted.store) {
            let store = own.first().and_then(|first| stores.get(first.wanted.store));
            let Some(store) = store else {
                continue;
            };
            let rows = own.iter().map(Placed::row).collect();
            let runs = plan::runs(rows, &lock(&self.state).inventory);
            let mut bytes = 0_usize;
            let mut due = Vec::new();
            for run in runs {
                bytes = bytes.saturating_add(store.bytes(&run));
                due.push(run);
                if bytes >= HAND_OVER_BYTES {
                    self.hand_over(store, core::mem::take(&mut due));
                    bytes = 0;
                }
            }
            self.hand_over(store, due);
        }
    }

    /// Hands over neighbouring rows of a store, unless what came before hung so long that the tier
    /// was closed meanwhile: then the arena may be gone; or that the store ended: then its slots
    /// may be somebody else's.
    fn hand_over(&self, store: &QueuedStore, mut runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        let mut state = lock(&self.state);
        if state.phase == Phase::Stopping || store.request.is_abandoned() {
            self.drop_rows(&mut state, store, &runs);
            return;
        }
        for row in runs.iter_mut().flatten() {
            row.counter = state.next_counter;
            state.next_counter = row.counter.saturating_add(1);
            if let Some(item) = store.request.items.get(row.position) {
                state.begin_writing(item.fingerprint, row.counter, store.number);
            }
        }
        let operations = self.launch(&mut state, &store.request, runs, store.epoch);
        drop(state);
        self.submit(operations);
    }

    /// Gives prepared rows back.
    fn drop_rows(&self, state: &mut State, store: &QueuedStore, runs: &[Run]) {
        let mut settlements = Vec::new();
        for row in runs.iter().flatten() {
            state.inventory.free_row(row.place, false);
            settlements.push(Settlement::plain(row.position, Outcome::Dropped));
        }
        self.settle(state, &store.request, &settlements, Some("closed"));
    }
}

impl Placed {
    /// The row, its checksum and counter not known yet.
    const fn row(&self) -> FlightRow {
        FlightRow {
            position: self.wanted.position,
            place: self.place,
            entry: None,
            checksum: RowChecksum(0),
            store_order: self.wanted.store_order,
            counter: 0,
        }
    }
}
