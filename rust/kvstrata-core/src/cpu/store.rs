//! Taking slots for new rows.

use hashbrown::HashSet;

use super::entries::Entry;
use super::requests::{Asker, tail_first};
use super::{CpuTier, Place, Prepared, User};
use crate::error::{Error, Result};
use crate::eviction::request::Tag;
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
        self.prepare_store_for(Asker::NOBODY, keys, user)
    }

    /// The same for a request, whose rows keep the order of its prompt however many calls store them.
    ///
    /// # Errors
    /// As [`CpuTier::prepare_store`].
    pub fn prepare_store_for(
        &mut self,
        asker: Asker<'_>,
        keys: &[Key],
        user: User,
    ) -> Result<Option<Prepared>> {
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
        if user == User::Worker {
            self.admit(keys, &mut fresh, asker);
        }
        // They must be there after this call, too.
        for (_, id) in &present {
            self.policy.pin(*id);
        }
        let prepared = self.give_slots(fresh, user, asker);
        for (_, id) in &present {
            self.policy.unpin(*id);
        }
        let Some((prepared, added)) = prepared else {
            self.counters.refused_stores += 1;
            return Ok(None);
        };
        self.insert(keys, &added, asker);
        self.access(keys, &present, asker);
        Ok(Some(prepared))
    }

    /// Whether rows of observed requests may be left out, where the policy says that they are worth less
    /// than those that would have to go. They reach no tier below then, for those are given what is
    /// stored here.
    pub fn set_bypass(&mut self, bypasses: bool) {
        self.bypasses = bypasses;
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
        asker: Asker<'_>,
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
            let Some(plan) = self.plan_for(&needs, user) else {
                if round == 0 {
                    return None;
                }
                break;
            };
            self.take_slabs(&plan, &mut prepared.evicted);
            let mut left_over = Vec::new();
            for at in 0..needs.len() {
                let own = fresh.iter().filter(|key| usize::from(key.class.0) == at);
                let mut own: Vec<Fresh> = own.copied().collect();
                let head = self.head_of(&mut own, user, asker);
                let spared = self.evict_own(&plan, at, head, &mut prepared.evicted);
                own.truncate(own.len().saturating_sub(spared));
                self.counters.bypassed_stores += u64::try_from(spared).unwrap_or(0);
                for key in &own {
                    match self.add(key, user, asker.request) {
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

    pub(super) fn class_of(&self, key: &Key) -> Result<SizeClass> {
        let group = key.group();
        self.options
            .position(group)
            .and_then(|at| self.slots.geometry().class_of(at))
            .ok_or_else(|| unknown_group(group))
    }

    /// Gives a new entry a slot; its row is being written by `user`.
    fn add(&mut self, fresh: &Fresh, user: User, request: u32) -> Option<(Place, EntryId)> {
        let id = self.entries.reserve()?;
        let slot = self.slots.take(fresh.class, id.0)?;
        let offset = self.slots.offset(slot)?;
        let entry = Entry {
            request,
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

    /// Leaves those keys out that the tier does not take, and tells the policy of the others, once for
    /// each request.
    fn admit(&mut self, keys: &[Key], fresh: &mut Vec<Fresh>, asker: Asker<'_>) {
        let until = self.requests.offered_until(asker.request);
        let options = &self.options;
        let group = |position: usize| options.position(keys.get(position)?.group());
        let is_new = |position: usize| {
            let known = group(position).and_then(|group| until.get(group));
            asker
                .end(position)
                .is_none_or(|end| known.is_none_or(|until| end > *until))
        };
        for at in 0..keys.len() {
            if let (Some(group), Some(end)) = (group(at), asker.end(at)) {
                self.requests.offered(asker.request, group, end);
            }
        }
        if !self.admission.takes_all() {
            let entries = &self.entries;
            let offered = keys.iter().enumerate().filter(|(at, _)| is_new(*at));
            let tags = offered.map(|(_, key)| entries.tag(key));
            self.admission.offered(tags);
            let (admission, policy) = (&self.admission, self.policy.as_ref());
            let before = fresh.len();
            fresh.retain(|one| admission.admits(entries.tag(&one.key), Some(policy)));
            let refused = before.saturating_sub(fresh.len());
            self.counters.unadmitted_stores += u64::try_from(refused).unwrap_or(0);
        }
        let missing = fresh.iter().filter(|one| is_new(one.position));
        let missing: Vec<Tag> = missing.map(|one| self.entries.tag(&one.key)).collect();
        if !missing.is_empty() {
            self.policy.missed(&missing);
        }
    }

    /// Puts keys of one class in the order of the prompt; what stands for the first of them in the
    /// policy, where that knows the request.
    fn head_of(&self, own: &mut [Fresh], user: User, asker: Asker<'_>) -> Option<Tag> {
        if !self.bypasses || user != User::Worker || !self.requests.is_observed(asker.request) {
            return None;
        }
        own.sort_by_key(|one| asker.end(one.position));
        own.first().map(|one| self.entries.tag(&one.key))
    }

    /// Tells the policy of new entries, pinned: in the order of the request, and behind those rows
    /// that it has already.
    fn insert(&mut self, keys: &[Key], added: &[(usize, EntryId)], asker: Asker<'_>) {
        let mut first: Vec<(usize, EntryId)> = Vec::with_capacity(added.len());
        let mut behind: Vec<(EntryId, u64, EntryId)> = Vec::new();
        for (own, before) in added.iter().zip(self.neighbours(added, asker)) {
            match before {
                Some((end, before)) => behind.push((before, end, own.1)),
                None => first.push(*own),
            }
        }
        for id in tail_first(keys, &first, asker) {
            if let Some((tag, placement)) = self.described(id) {
                self.policy.insert(id, tag, placement);
            }
        }
        behind.sort_by_key(|(before, end, _)| (*before, *end));
        for own in behind.chunk_by(|one, other| one.0 == other.0) {
            let rows: Vec<(EntryId, Tag, Placement)> = own
                .iter()
                .filter_map(|(_, _, id)| {
                    let (tag, placement) = self.described(*id)?;
                    Some((*id, tag, placement))
                })
                .collect();
            if let Some((before, ..)) = own.first() {
                self.policy.insert_behind(&rows, *before);
            }
        }
        for (_, id) in added {
            self.policy.pin(*id);
        }
        self.note_rows(added, asker);
    }

    /// For each new entry the row of its request that comes before it, if there is one, and the token
    /// that its own chunk ends with.
    fn neighbours(
        &mut self,
        added: &[(usize, EntryId)],
        asker: Asker<'_>,
    ) -> Vec<Option<(u64, EntryId)>> {
        let mut found = vec![None; added.len()];
        if asker.request == 0 {
            return found;
        }
        let mut order: Vec<(Class, u64, usize)> = Vec::with_capacity(added.len());
        for (at, (position, id)) in added.iter().enumerate() {
            if let (Some(class), Some(end)) = (self.class_of_entry(*id), asker.end(*position)) {
                order.push((class, end, at));
            }
        }
        order.sort_unstable();
        for own in order.chunk_by(|one, other| one.0 == other.0) {
            let ends: Vec<u64> = own.iter().map(|(_, end, _)| *end).collect();
            let Some((class, ..)) = own.first() else {
                continue;
            };
            let before = self.rows_before(asker.request, *class, &ends);
            for ((_, end, at), before) in own.iter().zip(before) {
                if let Some(place) = found.get_mut(*at) {
                    *place = before.map(|before| (*end, before));
                }
            }
        }
        found
    }

    /// What the policy is told of an entry.
    fn described(&self, id: EntryId) -> Option<(Tag, Placement)> {
        let entry = self.entries.get(id)?;
        let placement = Placement {
            class: self.class_of_entry(id)?,
            container: ContainerId(entry.slot.slab.0),
        };
        Some((self.entries.tag(&entry.key), placement))
    }
}

fn unknown_group(group: GroupId) -> Error {
    Error::argument(format!("a key of group {group}, which has no row size"))
}
