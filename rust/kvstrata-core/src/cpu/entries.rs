//! The rows by key and by number.

use core::hash::BuildHasher as _;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::User;
use crate::chunked::Chunked;
use crate::eviction::EntryId;
use crate::eviction::request::Tag;
use crate::key::Key;
use crate::slots::Slot;

/// Names one use of a row. No other row ever has the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// A row with a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) slot: Slot,
    /// Whether a lookup finds it.
    pub(super) listed: bool,
    /// Whether its bytes are not there yet; its writer is one of its users.
    pub(super) writing: bool,
    /// Uses by workers.
    pub(super) worker: u32,
    /// Uses by tiers below.
    pub(super) tier: u32,
    /// Waiting requests for which it stays; together they are one pin.
    pub(super) awaited: u32,
    /// The request that accessed it last; 0 for none.
    pub(super) request: u32,
}

impl Entry {
    /// A listed row that `user` writes.
    pub(super) fn writing(key: Key, slot: Slot, user: User) -> Self {
        Self {
            key,
            slot,
            listed: true,
            writing: true,
            worker: u32::from(user == User::Worker),
            tier: u32::from(user == User::Tier),
            awaited: 0,
            request: 0,
        }
    }

    /// Whether it may go.
    pub(super) const fn is_idle(&self) -> bool {
        self.listed && self.worker == 0 && self.tier == 0
    }
}

#[derive(Debug, Default)]
struct Record {
    generation: u32,
    entry: Option<Entry>,
}

/// All entries; numbers of removed ones are given again.
#[derive(Debug, Default)]
pub(super) struct Entries {
    records: Chunked<Record>,
    free: Vec<u32>,
    by_key: HashTable<u32>,
    hasher: DefaultHashBuilder,
    unlisted: Vec<EntryId>,
    /// The number that [`Entries::find_mut`] found last, and what to add for the next.
    guess: (u32, u32),
}

impl Entries {
    /// The listed entry of a key.
    pub(super) fn find(&self, key: &Key) -> Option<(EntryId, &Entry)> {
        let number = *self
            .by_key
            .find(self.hasher.hash_one(key), |number| self.is_of(*number, key))?;
        Some((EntryId(number), self.get(EntryId(number))?))
    }

    /// What stands for a key in the eviction policy.
    pub(super) fn tag(&self, key: &Key) -> Tag {
        Tag(self.hasher.hash_one(key))
    }

    /// The listed entry of a key, to change it, and its handle.
    ///
    /// Keys of a request are looked up in the order in which they were stored, or the other way
    /// round, and that is how their entries are numbered for the most part. So the number that
    /// comes next is tried before the hash table, whose places lie all over memory.
    pub(super) fn find_mut(&mut self, key: &Key) -> Option<(Handle, EntryId, &mut Entry)> {
        let guess = self.guess.0.wrapping_add(self.guess.1);
        let number = if self.is_listed(guess, key) {
            guess
        } else {
            let found = self.find(key)?.0.0;
            self.guess.1 = if found.wrapping_add(1) == self.guess.0 {
                u32::MAX
            } else {
                1
            };
            found
        };
        self.guess.0 = number;
        let record = self.records.get_mut(number)?;
        let handle = Handle(u64::from(record.generation) << 32 | u64::from(number));
        Some((handle, EntryId(number), record.entry.as_mut()?))
    }

    fn is_listed(&self, number: u32, key: &Key) -> bool {
        self.get(EntryId(number))
            .is_some_and(|entry| entry.listed && entry.key == *key)
    }

    pub(super) fn get(&self, id: EntryId) -> Option<&Entry> {
        self.records.get(id.0)?.entry.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.records.get_mut(id.0)?.entry.as_mut()
    }

    /// A number for [`Entries::insert`]; the same until then.
    pub(super) fn reserve(&mut self) -> Option<EntryId> {
        if self.free.is_empty() {
            let number = u32::try_from(self.records.len())
                .ok()
                .filter(|number| *number < u32::MAX - 1)?;
            self.records.push(Record::default());
            self.free.push(number);
        }
        self.free.last().map(|number| EntryId(*number))
    }

    /// Lists an entry under the number reserved last. Its key must not be listed.
    pub(super) fn insert(&mut self, id: EntryId, entry: Entry) -> Handle {
        self.free.pop();
        if let Some(record) = self.records.get_mut(id.0) {
            record.entry = Some(entry);
        }
        let (records, hasher) = (&self.records, &self.hasher);
        self.by_key
            .insert_unique(hasher.hash_one(entry.key), id.0, |number| {
                let entry = records.get(*number).and_then(|one| one.entry.as_ref());
                entry.map_or(0, |entry| hasher.hash_one(entry.key))
            });
        self.handle(id).unwrap_or(Handle(u64::MAX))
    }

    /// The handle of an entry.
    pub(super) fn handle(&self, id: EntryId) -> Option<Handle> {
        let record = self.records.get(id.0)?;
        record.entry.as_ref()?;
        Some(Handle(u64::from(record.generation) << 32 | u64::from(id.0)))
    }

    /// The entry that a handle names, if it is still there.
    pub(super) fn held(&self, handle: Handle) -> Option<(EntryId, &Entry)> {
        let id = EntryId(u32::try_from(handle.0 & u64::from(u32::MAX)).ok()?);
        (self.handle(id)? == handle).then_some(())?;
        Some((id, self.get(id)?))
    }

    /// Lets lookups find an entry no more.
    pub(super) fn unlist(&mut self, id: EntryId) {
        let Some(entry) = self.get_mut(id) else {
            return;
        };
        if !core::mem::replace(&mut entry.listed, false) {
            return;
        }
        let key = entry.key;
        self.unlisted.push(id);
        let hash = self.hasher.hash_one(key);
        if let Ok(found) = self.by_key.find_entry(hash, |number| *number == id.0) {
            found.remove();
        }
    }

    /// Removes an entry that is not listed. Its number may be given again.
    pub(super) fn remove(&mut self, id: EntryId) {
        if let Some(record) = self.records.get_mut(id.0) {
            record.entry = None;
            record.generation = record.generation.wrapping_add(1);
            self.free.push(id.0);
        }
        if let Some(at) = self.unlisted.iter().rposition(|other| *other == id) {
            self.unlisted.swap_remove(at);
        }
    }

    /// All listed entries.
    pub(super) fn listed(&self) -> Vec<EntryId> {
        let mut all: Vec<EntryId> = self.by_key.iter().map(|number| EntryId(*number)).collect();
        all.sort_unstable();
        all
    }

    /// All entries that are in use and not listed; removing them in this order is fast.
    pub(super) fn unlisted(&self) -> Vec<EntryId> {
        self.unlisted.iter().rev().copied().collect()
    }

    /// Number of listed entries, and of the others.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.by_key.len(), self.unlisted.len())
    }

    fn is_of(&self, number: u32, key: &Key) -> bool {
        self.get(EntryId(number))
            .is_some_and(|entry| entry.key == *key)
    }
}
