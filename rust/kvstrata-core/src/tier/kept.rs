//! Rows that stay while a store is planned: those that it finds present, and those that it brings.
//!
//! They are pinned, so that none goes for another row of the same store, neither alone nor with
//! its file, and a search for victims passes each of them once, however often it is made.

use std::collections::HashMap;

use crate::eviction::EntryId;
use crate::index::Fingerprint;
use crate::sys::sync::{Arc, MutexGuard, lock};
use crate::tier::disk::DiskTier;
use crate::tier::removals::StoreNumber;
use crate::tier::request::Request;
use crate::tier::state::{QueuedStore, State};

/// Rows that are let go at a time: bounds how long the lock is held.
const LET_GO_MAX: usize = 1024;

/// A store that is being planned.
#[derive(Clone, Debug)]
struct Begun {
    request: Arc<Request>,
    number: StoreNumber,
    /// Order of its first row; no row has a later one that no store being planned brings.
    first_order: u64,
}

/// The stores that are being planned, and the rows that stay for them.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// In their order; all but the last have no keys left after this batch.
    begun: Vec<Begun>,
    /// Each with the last store that it stays for.
    rows: HashMap<EntryId, StoreNumber>,
    /// The policy's tick when the first of them was begun.
    tick: Option<u64>,
}

impl Kept {
    /// What was accessed at this tick or later was so while these stores are planned.
    pub(crate) const fn tick(&self) -> Option<u64> {
        self.tick
    }
}

impl State {
    /// Notes that a store is being planned.
    pub(crate) fn begin_planning(&mut self, store: &mut QueuedStore) {
        if core::mem::replace(&mut store.is_begun, true) {
            return;
        }
        self.kept.tick.get_or_insert(self.inventory.now());
        self.kept.begun.push(Begun {
            request: Arc::clone(&store.request),
            number: store.number,
            first_order: self.next_store_order,
        });
    }

    /// Keeps a row until this store is planned.
    pub(crate) fn keep(&mut self, entry: EntryId, number: StoreNumber) {
        if self.kept.rows.insert(entry, number).is_none() {
            self.inventory.pin(entry);
        }
    }

    /// Keeps a row that was just listed if a store that is being planned brought its key, or found
    /// it being stored.
    pub(crate) fn keep_listed(&mut self, entry: EntryId, order: u64, key: Fingerprint) {
        let begun = self.kept.begun.iter().rev();
        let followers = self.writing.get(&key).map(|writing| &writing.followers);
        let is_for = |begun: &&Begun| {
            let mut all = followers.into_iter().flatten();
            order >= begun.first_order
                || all.any(|(follower, _)| Arc::ptr_eq(follower, &begun.request))
        };
        let number = begun.filter(is_for).map(|begun| begun.number).next();
        if let Some(number) = number {
            self.keep(entry, number);
        }
    }

    /// Lets a row go.
    pub(crate) fn let_go(&mut self, entry: EntryId) {
        if self.kept.rows.remove(&entry).is_some() {
            self.unpin(entry);
        }
    }

    /// Lets all rows go: no store is left that is being planned.
    pub(crate) fn let_all_go(&mut self) {
        let kept = core::mem::take(&mut self.kept);
        for entry in kept.rows.into_keys() {
            self.unpin(entry);
        }
    }
}

impl DiskTier {
    /// Lets go what stayed for stores that are planned. The first one in the queue may be planned
    /// in part: what stays for it stays.
    pub(super) fn end_planning(&self, mut state: MutexGuard<'_, State>) {
        let open = state.queued.front().filter(|store| store.is_begun);
        let open = open.map(|store| store.number);
        let only = state.kept.begun.first().map(|begun| begun.number);
        if only.is_some() && only == open {
            // All is for that one.
            return;
        }
        state.kept.begun.retain(|begun| Some(begun.number) == open);
        if open.is_none() {
            state.kept.tick = None;
        }
        let rows = state.kept.rows.iter().map(|(row, of)| (*row, *of));
        let due: Vec<_> = rows.filter(|(_, of)| Some(*of) != open).collect();
        drop(state);
        for some in due.chunks(LET_GO_MAX) {
            let mut state = lock(&self.state);
            for (row, of) in some {
                // Another store may have come that it stays for.
                if state.kept.rows.get(row) == Some(of) {
                    state.let_go(*row);
                }
            }
        }
    }
}
