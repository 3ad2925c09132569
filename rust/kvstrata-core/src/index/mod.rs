//! Which key lies where: hash tables of dense entries.
//!
//! An entry takes 48 bytes and 6 to 12 in a hash table, the eviction policy's own record and the
//! row's use not counted. The whole key is not kept: a 128-bit SipHash-2-4 fingerprint stands for it,
//! and the checksum of a row, which covers the whole key, is verified at every load. `SipHash` is a
//! pseudorandom function for short inputs (Aumasson, Bernstein 2012) under a secret of 128 bits,
//! which is drawn anew by each process: nobody can construct two keys that collide. Of millions of
//! keys it is computed in a third of the time that BLAKE3 takes.
//!
//! Nothing here takes time that grows with the number of entries: entries lie in pieces that never
//! move, and each of many small tables grows by itself.

pub mod batch;
pub mod recovery;

use core::hash::Hasher as _;

use hashbrown::HashTable;
use siphasher::sip128::{Hasher128 as _, SipHasher24};

use crate::chunked::Chunked;
use crate::eviction::request::Tag;
use crate::eviction::{ContainerId, EntryId};
use crate::format::checksum::RowChecksum;
use crate::key::Key;

/// Stands for a key in this process's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u64; 2]);

impl Fingerprint {
    /// Half of it: enough where two keys that share it cost a miss and no more.
    #[must_use]
    pub const fn half(self) -> u64 {
        let [half, _] = self.0;
        half
    }
}

/// Makes fingerprints that depend on a secret of this process.
#[derive(Clone)]
pub struct Fingerprinter {
    secret: [u8; 16],
}

impl core::fmt::Debug for Fingerprinter {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Fingerprinter")
    }
}

impl Fingerprinter {
    /// Fingerprints under `secret`, which must come from the operating system's random source.
    pub const fn new(secret: [u8; 16]) -> Self {
        Self { secret }
    }

    /// The fingerprint of `key`.
    pub fn of(&self, key: &Key) -> Fingerprint {
        let mut hasher = SipHasher24::new_with_key(&self.secret);
        hasher.write(key.as_bytes());
        let hash = hasher.finish128();
        Fingerprint([hash.h1, hash.h2])
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

/// What the index knows of one row. Its class is its container's.
#[derive(Clone, Copy, Debug)]
pub struct IndexEntry {
    /// The key's fingerprint.
    pub fingerprint: Fingerprint,
    /// Where the row is.
    pub place: RowPlace,
    /// Checksum over namespace, key, length and payload.
    pub checksum: RowChecksum,
    /// Position in the order of all stores of the namespace.
    pub store_order: u64,
    /// Loads that are reading the row; from [`PINS_LOST`] on they are not counted any more.
    pub pins: u16,
    /// Coarse time of the last access, seconds since 1970.
    pub access_time: u32,
    /// Whether `access_time` is newer than what the row table says.
    pub access_dirty: bool,
    /// Whether lookups find it; false once removed while still pinned.
    pub listed: bool,
}

/// A row with so many pins stays where it is for good: a pin too few would give it away.
pub const PINS_LOST: u16 = u16::MAX;

/// Number of hash tables, as a power of two: so many that a table of an index of ten million
/// entries still grows within a millisecond.
const SHARD_BITS: u32 = 10;
const SHARDS: usize = 1 << SHARD_BITS;

/// One hash table.
type Shard = HashTable<u32>;

/// The index of one namespace. Pure: no I/O, no clock, no locks.
pub struct Index {
    shards: Vec<Shard>,
    slab: Chunked<IndexEntry>,
    vacant: Vec<u32>,
    listed: usize,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            shards: core::iter::repeat_with(Shard::new).take(SHARDS).collect(),
            slab: Chunked::default(),
            vacant: Vec::new(),
            listed: 0,
        }
    }
}

/// Bits of a hash below those that number its table. The tables themselves use the lowest bits, as
/// many as they are large, and the seven highest.
const SHARD_SHIFT: u32 = 40;

/// The table that lists what has this hash.
fn shard_of(hash: u64) -> usize {
    usize::try_from(hash >> SHARD_SHIFT).unwrap_or(0) % SHARDS
}

impl Fingerprint {
    /// Its hash, for the choice of a table and within it.
    const fn hash(self) -> u64 {
        let [low, _] = self.0;
        low
    }

    /// What stands for the key in an eviction policy.
    pub const fn tag(self) -> Tag {
        let [_, high] = self.0;
        Tag(high)
    }

    /// The table that lists it.
    fn shard(self) -> usize {
        shard_of(self.hash())
    }
}

fn hash_at(slab: &Chunked<IndexEntry>, at: u32) -> u64 {
    slab.get(at).map_or(0, |entry| entry.fingerprint.hash())
}

impl core::fmt::Debug for Index {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter
            .debug_struct("Index")
            .field("listed", &self.listed)
            .finish_non_exhaustive()
    }
}

impl Index {
    /// Number of keys that lookups find.
    pub const fn len(&self) -> usize {
        self.listed
    }

    /// Whether lookups find nothing.
    pub const fn is_empty(&self) -> bool {
        self.listed == 0
    }

    /// The entry of a key, if it is listed.
    pub fn find(&self, fingerprint: Fingerprint) -> Option<EntryId> {
        let is_it = |at: &u32| {
            let entry = self.slab.get(*at);
            entry.is_some_and(|entry| entry.fingerprint == fingerprint)
        };
        let shard = self.shards.get(fingerprint.shard())?;
        shard.find(fingerprint.hash(), is_it).copied().map(EntryId)
    }

    /// What is known of an entry.
    pub fn get(&self, id: EntryId) -> Option<&IndexEntry> {
        self.slab.get(id.0)
    }

    /// What is known of an entry, to change it. The fingerprint must stay.
    pub fn get_mut(&mut self, id: EntryId) -> Option<&mut IndexEntry> {
        self.slab.get_mut(id.0)
    }

    /// Lists an entry; an older one of the same key must have been unlisted before.
    ///
    /// Returns `None` when as many entries are in use as there can be, nearly 2^32.
    pub fn insert(&mut self, entry: IndexEntry) -> Option<EntryId> {
        debug_assert!(
            self.find(entry.fingerprint).is_none(),
            "a key is listed twice"
        );
        let at = if let Some(at) = self.vacant.pop() {
            *self.slab.get_mut(at)? = entry;
            at
        } else {
            let at = u32::try_from(self.slab.len())
                .ok()
                .filter(|at| *at < batch::ENTRIES_MAX)?;
            self.slab.push(entry);
            at
        };
        let slab = &self.slab;
        let shard = self.shards.get_mut(entry.fingerprint.shard())?;
        shard.insert_unique(entry.fingerprint.hash(), at, |other| hash_at(slab, *other));
        self.listed = self.listed.saturating_add(1);
        Some(EntryId(at))
    }

    /// Hides an entry from lookups; its record stays until [`Index::forget`].
    pub fn unlist(&mut self, id: EntryId) {
        let Some(fingerprint) = self.get(id).map(|entry| entry.fingerprint) else {
            return;
        };
        if let Some(shard) = self.shards.get_mut(fingerprint.shard())
            && let Ok(found) = shard.find_entry(fingerprint.hash(), |at| *at == id.0)
        {
            found.remove();
            self.listed = self.listed.saturating_sub(1);
        }
        if let Some(entry) = self.get_mut(id) {
            entry.listed = false;
        }
    }

    /// Gives the record of an unlisted entry back.
    pub fn forget(&mut self, id: EntryId) {
        debug_assert!(
            self.get(id)
                .is_some_and(|entry| !entry.listed && entry.pins == 0)
        );
        self.vacant.push(id.0);
    }

    /// Ids of all listed entries, in no particular order.
    pub fn listed(&self) -> impl Iterator<Item = EntryId> + '_ {
        self.shards.iter().flatten().map(|at| EntryId(*at))
    }
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
        Fingerprinter::new([3; 16]).of(key)
    }

    fn entry(key: &Key, row: u32) -> IndexEntry {
        IndexEntry {
            fingerprint: fingerprint(key),
            place: RowPlace {
                container: ContainerId(0),
                row,
            },
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
    fn an_entry_takes_48_bytes() {
        assert_eq!(size_of::<IndexEntry>(), 48);
    }
}
