//! Which key lies where: a hash table of dense entries.
//!
//! An entry takes 72 bytes in the slab and about 6 in the hash table, the eviction policy's own
//! record not counted. The whole key is not kept: a keyed 128-bit BLAKE3 fingerprint stands for it
//! (its secret is drawn anew by each process, so that nobody can construct two keys that collide),
//! and the checksum of a row, which covers the whole key, is verified at every load.

pub mod recovery;

use hashbrown::HashTable;

use crate::eviction::{Class, ContainerId, EntryId};
use crate::format::checksum::RowChecksum;
use crate::key::Key;

/// Stands for a key in this process's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u64; 2]);

/// Makes fingerprints that depend on a secret of this process.
#[derive(Clone)]
pub struct Fingerprinter {
    secret: [u8; 32],
}

impl core::fmt::Debug for Fingerprinter {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Fingerprinter")
    }
}

impl Fingerprinter {
    /// Fingerprints under `secret`, which must come from the operating system's random source.
    pub const fn new(secret: [u8; 32]) -> Self {
        Self { secret }
    }

    /// The fingerprint of `key`.
    pub fn of(&self, key: &Key) -> Fingerprint {
        let hash = blake3::keyed_hash(&self.secret, key.as_bytes());
        let (low, rest) = hash.as_bytes().split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
        let high = rest.first_chunk::<8>().unwrap_or(&[0; 8]);
        Fingerprint([u64::from_le_bytes(*low), u64::from_le_bytes(*high)])
    }
}

/// A row of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowPlace {
    /// The row file.
    pub container: ContainerId,
    /// Number of the row in it.
    pub row: u32,
}

/// What the index knows of one row.
#[derive(Clone, Copy, Debug)]
pub struct IndexEntry {
    /// The key's fingerprint.
    pub fingerprint: Fingerprint,
    /// Where the row is.
    pub place: RowPlace,
    /// The class it is evicted in.
    pub class: Class,
    /// Checksum over namespace, key, length and payload.
    pub checksum: RowChecksum,
    /// Position in the order of all stores of the namespace.
    pub store_order: u64,
    /// Loads that are reading the row.
    pub pins: u32,
    /// Coarse time of the last access, seconds since 1970.
    pub access_time: u32,
    /// Whether `access_time` is newer than what the row table says.
    pub access_dirty: bool,
    /// Whether lookups find it; false once removed while still pinned.
    pub listed: bool,
}

/// The index of one namespace. Pure: no I/O, no clock, no locks.
#[derive(Default)]
pub struct Index {
    table: HashTable<u32>,
    slab: Vec<IndexEntry>,
    vacant: Vec<u32>,
}

impl core::fmt::Debug for Index {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_struct("Index").field("listed", &self.table.len()).finish_non_exhaustive()
    }
}

impl Index {
    /// Number of keys that lookups find.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether lookups find nothing.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The entry of a key, if it is listed.
    pub fn find(&self, fingerprint: Fingerprint) -> Option<EntryId> {
        let slab = &self.slab;
        self.table
            .find(fingerprint.0[0], |at| {
                entry_at(slab, *at).is_some_and(|entry| entry.fingerprint == fingerprint)
            })
            .map(|at| EntryId(*at))
    }

    /// What is known of an entry.
    pub fn get(&self, id: EntryId) -> Option<&IndexEntry> {
        entry_at(&self.slab, id.0)
    }

    /// What is known of an entry, to change it. The fingerprint must stay.
    pub fn get_mut(&mut self, id: EntryId) -> Option<&mut IndexEntry> {
        self.slab.get_mut(usize::try_from(id.0).ok()?)
    }

    /// Lists an entry; an older one of the same key must have been unlisted before.
    ///
    /// Returns `None` when 2^32 - 1 entries are in use.
    pub fn insert(&mut self, entry: IndexEntry) -> Option<EntryId> {
        debug_assert!(self.find(entry.fingerprint).is_none(), "a key is listed twice");
        let at = if let Some(at) = self.vacant.pop() {
            *self.slab.get_mut(usize::try_from(at).ok()?)? = entry;
            at
        } else {
            let at = u32::try_from(self.slab.len()).ok().filter(|at| *at != u32::MAX)?;
            self.slab.push(entry);
            at
        };
        let slab = &self.slab;
        self.table.insert_unique(entry.fingerprint.0[0], at, |other| {
            entry_at(slab, *other).map_or(0, |entry| entry.fingerprint.0[0])
        });
        Some(EntryId(at))
    }

    /// Hides an entry from lookups; its record stays until [`Index::forget`].
    pub fn unlist(&mut self, id: EntryId) {
        let Some(entry) = self.get(id).copied() else {
            return;
        };
        if let Ok(found) = self.table.find_entry(entry.fingerprint.0[0], |at| *at == id.0) {
            found.remove();
        }
        if let Some(entry) = self.get_mut(id) {
            entry.listed = false;
        }
    }

    /// Gives the record of an unlisted entry back.
    pub fn forget(&mut self, id: EntryId) {
        debug_assert!(self.get(id).is_some_and(|entry| !entry.listed && entry.pins == 0));
        self.vacant.push(id.0);
    }

    /// Makes room for `more` entries at once.
    pub fn reserve(&mut self, more: usize) {
        self.slab.reserve(more);
        let slab = &self.slab;
        self.table.reserve(more, |at| entry_at(slab, *at).map_or(0, |e| e.fingerprint.0[0]));
    }

    /// Ids of all listed entries, in no particular order.
    pub fn listed(&self) -> impl Iterator<Item = EntryId> + '_ {
        self.table.iter().map(|at| EntryId(*at))
    }
}

fn entry_at(slab: &[IndexEntry], at: u32) -> Option<&IndexEntry> {
    slab.get(usize::try_from(at).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(middle: u8) -> Key {
        let mut bytes = [1; 36];
        bytes[16] = middle;
        Key::new(&bytes).unwrap()
    }

    fn fingerprint(key: &Key) -> Fingerprint {
        Fingerprinter::new([3; 32]).of(key)
    }

    fn entry(key: &Key, row: u32) -> IndexEntry {
        IndexEntry {
            fingerprint: fingerprint(key),
            place: RowPlace { container: ContainerId(0), row },
            class: Class(0),
            checksum: RowChecksum(0),
            store_order: 0,
            pins: 0,
            access_time: 0,
            access_dirty: false,
            listed: true,
        }
    }

    #[test]
    fn keys_that_differ_only_in_the_middle_are_distinct() {
        let mut index = Index::default();
        for middle in 0..=255 {
            let own = entry(&key(middle), u32::from(middle));
            index.insert(own).unwrap();
        }
        for middle in 0..=255 {
            let id = index.find(fingerprint(&key(middle))).unwrap();
            assert_eq!(index.get(id).unwrap().place.row, u32::from(middle));
        }
        assert_eq!(index.len(), 256);
    }

    #[test]
    fn an_unlisted_entry_is_not_found_and_its_record_is_used_again() {
        let mut index = Index::default();
        let own = entry(&key(1), 1);
        let first = index.insert(own).unwrap();
        index.unlist(first);
        assert_eq!(index.find(own.fingerprint), None);
        assert_eq!(index.get(first).unwrap().place.row, 1);
        let second = index.insert(entry(&key(1), 2)).unwrap();
        assert_ne!(first, second);
        index.forget(first);
        assert_eq!(index.insert(entry(&key(2), 3)).unwrap(), first);
        assert_eq!(index.find(fingerprint(&key(1))), Some(second));
    }

    #[test]
    fn an_entry_takes_72_bytes() {
        assert!(size_of::<IndexEntry>() <= 72, "{}", size_of::<IndexEntry>());
    }
}
