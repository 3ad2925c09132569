//! Taking slots for new rows, and the order of a request's rows.

use core::cmp::Reverse;

use hashbrown::HashSet;

use super::entries::Entry;
use super::{CpuTier, Place, Prepared, User};
use crate::error::{Error, Result};
use crate::eviction::{Class, ContainerId, EntryId, Placement};
use crate::key::{GroupId, Key};
use crate::slots::SizeClass;

/// A key without a row.
#[derive(Clone, Copy, Debug)]
struct Fresh {
    position: usize,
    key: Key,
    class: SizeClass,
}

impl CpuTier {
    /// Takes slots for the keys that have no row yet, in the order given; each key once. Rows of
    /// `keys` that are there already stay, and count as accessed. `None` when there is not enough
    /// space for all: then nothing has changed.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::error::ErrorKind::Argument) for a key of a group without a
    /// row size.
    pub fn prepare_store(&mut self, keys: &[Key], user: User) -> Result<Option<Prepared>> {
        let mut fresh = Vec::new();
        let mut present = Vec::new();
        let mut seen = HashSet::new();
        for (position, key) in keys.iter().enumerate() {
            let class = self.class_of(key)?;
            if let Some((id, _)) = self.entries.find(key) {
                present.push((position, id));
            } else if seen.insert(*key) {
                fresh.push(Fresh {
                    position,
                    key: *key,
                    class,
                });
            }
        }
        // They must be there after this call, too.
        for (_, id) in &present {
            self.policy.pin(*id);
        }
        let prepared = self.give_slots(fresh, user);
        for (_, id) in &present {
            self.policy.unpin(*id);
        }
        let Some((prepared, added)) = prepared else {
            self.counters.refused_stores += 1;
            return Ok(None);
        };
        self.insert(keys, &added);
        self.access(keys, &present);
        Ok(Some(prepared))
    }

    /// Slots for all keys, whatever has to go for them; or `None`, and nothing has changed.
    ///
    /// A plan counts slots, and where a store of several sizes empties the short slab at the end,
    /// the wrong size may take it. What is left over then is planned once more, and at the worst
    /// not stored.
    fn give_slots(
        &mut self,
        mut fresh: Vec<Fresh>,
        user: User,
    ) -> Option<(Prepared, Vec<(usize, EntryId)>)> {
        let mut prepared = Prepared::default();
        let mut given = Vec::with_capacity(fresh.len());
        for round in 0..2 {
            let mut needs = vec![0_u64; self.slots.geometry().classes()];
            for key in &fresh {
                if let Some(need) = needs.get_mut(usize::from(key.class.0)) {
                    *need += 1;
                }
            }
            let Some(plan) = self.plan(&needs) else {
                if round == 0 {
                    return None;
                }
                break;
            };
            self.take_slabs(&plan, &mut prepared.evicted);
            let mut left_over = Vec::new();
            for at in 0..needs.len() {
                self.evict_own(&plan, at, &mut prepared.evicted);
                for key in fresh.iter().filter(|key| usize::from(key.class.0) == at) {
                    match self.add(key, user) {
                        Some((place, id)) => given.push((key.position, place, id)),
                        None => left_over.push(*key),
                    }
                }
            }
            fresh = left_over;
            if fresh.is_empty() {
                break;
            }
        }
        given.sort_unstable_by_key(|(position, ..)| *position);
        let mut added = Vec::with_capacity(given.len());
        for (position, place, id) in given {
            prepared.positions.push(position);
            prepared.places.push(place);
            added.push((position, id));
        }
        Some((prepared, added))
    }

    fn class_of(&self, key: &Key) -> Result<SizeClass> {
        let group = key.group();
        self.options
            .position(group)
            .and_then(|at| self.slots.geometry().class_of(at))
            .ok_or_else(|| unknown_group(group))
    }

    /// Gives a new entry a slot; its row is being written by `user`.
    fn add(&mut self, fresh: &Fresh, user: User) -> Option<(Place, EntryId)> {
        let id = self.entries.reserve()?;
        let slot = self.slots.take(fresh.class, id.0)?;
        let offset = self.slots.offset(slot)?;
        let entry = Entry {
            request: self.request,
            ..Entry::writing(fresh.key, slot, user)
        };
        let handle = self.entries.insert(id, entry);
        self.counters.stored_keys += 1;
        self.counters.writing += 1;
        if let Some(at) = self.options.position(fresh.key.group()) {
            self.counters.add_row(at);
        }
        Some((Place { handle, offset }, id))
    }

    /// Tells the policy of new entries, pinned, and of the order within their request.
    fn insert(&mut self, keys: &[Key], added: &[(usize, EntryId)]) {
        for id in tail_first(keys, added) {
            let Some(entry) = self.entries.get(id) else {
                continue;
            };
            let slab = entry.slot.slab;
            let Some(class) = self.slots.class_of(slab) else {
                continue;
            };
            let placement = Placement {
                class: Class(class.0),
                container: ContainerId(slab.0),
            };
            let tag = self.entries.tag(&entry.key);
            self.policy.insert(id, tag, placement);
            self.policy.pin(id);
        }
    }

    pub(super) fn access(&mut self, keys: &[Key], found: &[(usize, EntryId)]) {
        for id in tail_first(keys, found) {
            if self.is_first_access(id) {
                self.policy.access(id);
            }
        }
    }
}

/// Entries of a request from its tail to its head. Keys come group by group, each from its head;
/// chunks of the same number in all groups stay side by side, for a prefix needs all of them.
fn tail_first(keys: &[Key], found: &[(usize, EntryId)]) -> Vec<EntryId> {
    let mut order = Vec::with_capacity(found.len());
    let mut group = None;
    let mut first = 0;
    for (position, id) in found {
        let own = keys.get(*position).map(Key::group);
        if own != group {
            group = own;
            first = *position;
        }
        order.push((position - first, *id));
    }
    order.sort_by_key(|(number, _)| Reverse(*number));
    order.into_iter().map(|(_, id)| id).collect()
}

fn unknown_group(group: GroupId) -> Error {
    Error::argument(format!("a key of group {group}, which has no row size"))
}
