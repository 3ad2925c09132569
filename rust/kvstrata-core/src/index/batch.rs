//! Many entries at once, gathered by several threads: how an index is filled at open.
//!
//! Each thread fills a [`Batch`]: pieces of the index's own memory, whose numbers it draws from
//! what all threads share. Nothing is moved afterwards. [`Batch::assemble`] then fills the hash
//! tables, again on several threads, while another puts the entries in the order of their last
//! accesses.

use super::{Fingerprint, Index, IndexEntry, RowPlace, SHARDS, Shard, hash_at, shard_of};
use crate::chunked::{CHUNK, Chunked};
use crate::eviction::{ContainerId, EntryId};
use crate::format::checksum::RowChecksum;
use crate::sys::sync::atomic::{AtomicU32, Ordering};
use crate::sys::sync::{Mutex, fan_out, lock};

/// Numbers of entries are below this; larger ones have other meanings elsewhere.
pub const ENTRIES_MAX: u32 = u32::MAX - CHUNK_NUMBERS;
/// Numbers of a piece.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a constant far below 2^32"
)]
const CHUNK_NUMBERS: u32 = CHUNK as u32;

/// Hash tables that are filled together: few enough to stay in a processor's cache, and so many
/// that the parts of a batch, all of which grow at once, do so too.
const SHARDS_TOGETHER: usize = 16;
const PARTS: usize = SHARDS / SHARDS_TOGETHER;

/// Draws numbers of pieces.
#[derive(Debug, Default)]
pub struct ChunkNumbers(AtomicU32);

impl ChunkNumbers {
    /// The first number of a new piece; `None` when there are no more.
    fn draw(&self) -> Option<u32> {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |number| {
                number.checked_add(1)
            })
            .ok()?
            .checked_mul(CHUNK_NUMBERS)
            .filter(|first| *first < ENTRIES_MAX)
    }
}

/// Where an entry is in the order of last accesses: within one second the tail of a request, which
/// was stored last, is the colder end. Carries the entry's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Recency(u128);

impl Recency {
    const fn new(entry: &IndexEntry, number: u32) -> Self {
        #[expect(
            clippy::as_conversions,
            reason = "all three are widened; From is not const"
        )]
        let (time, order, number) = (
            entry.access_time as u128,
            !entry.store_order as u128,
            number as u128,
        );
        Self(time << 96 | order << 32 | number)
    }

    fn entry(self) -> EntryId {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        EntryId(u32::from_le_bytes([a, b, c, d]))
    }
}

/// What one thread has gathered.
#[derive(Debug)]
pub struct Batch<'numbers> {
    numbers: &'numbers ChunkNumbers,
    /// Full pieces, and the last one, with the number of each's first entry.
    chunks: Vec<(u32, Vec<IndexEntry>)>,
    order: Vec<Recency>,
    /// Hash and number of the entries of each part of the hash tables.
    parts: Vec<Vec<(u64, u32)>>,
}

impl<'numbers> Batch<'numbers> {
    /// Nothing yet.
    pub fn new(numbers: &'numbers ChunkNumbers) -> Self {
        Self {
            numbers,
            chunks: Vec::new(),
            order: Vec::new(),
            parts: vec![Vec::new(); PARTS],
        }
    }

    /// Says that `more` entries will follow.
    pub fn reserve(&mut self, more: usize) {
        self.order.reserve(more);
    }

    /// Takes an entry; its number, unless there are too many.
    pub fn push(&mut self, entry: IndexEntry) -> Option<EntryId> {
        if self
            .chunks
            .last()
            .is_none_or(|(_, chunk)| chunk.len() == CHUNK)
        {
            let first = self.numbers.draw()?;
            self.chunks.push((first, Vec::with_capacity(CHUNK)));
        }
        let (first, chunk) = self.chunks.last_mut()?;
        let number = first.checked_add(u32::try_from(chunk.len()).ok()?)?;
        self.order.push(Recency::new(&entry, number));
        let part = entry.fingerprint.shard() / SHARDS_TOGETHER;
        if let Some(numbers) = self.parts.get_mut(part) {
            numbers.push((entry.fingerprint.hash(), number));
        }
        chunk.push(entry);
        Some(EntryId(number))
    }

    /// Sorts what was gathered by last access, so that it only has to be merged.
    pub fn sort(&mut self) {
        self.order.sort_unstable();
    }

    /// Makes an index of all batches, which must have been [sorted](Batch::sort). Of two entries of
    /// a key the one stored later is listed; returned are those that are not, which are still to be
    /// [forgotten](Index::forget).
    ///
    /// `beside` is called on a thread of its own meanwhile, with all entries in the order of their
    /// numbers and in that of their last accesses, the coldest first.
    pub fn assemble(
        batches: &mut [Self],
        workers: usize,
        beside: impl FnOnce(Places<'_>, Order<'_>) + Send,
    ) -> (Index, Vec<EntryId>) {
        let mut chunks: Vec<(u32, Vec<IndexEntry>)> = batches
            .iter_mut()
            .flat_map(|batch| batch.chunks.drain(..))
            .collect();
        chunks.sort_unstable_by_key(|(first, _)| *first);
        let vacant = fill_up(&mut chunks);
        let slab = Chunked::from_chunks(chunks.into_iter().map(|(_, chunk)| chunk).collect());
        let mut index = Index {
            slab,
            vacant,
            ..Index::default()
        };
        let slab = &index.slab;
        let beside = Mutex::new(Some(beside));
        let left = Mutex::new(index.shards.chunks_mut(SHARDS_TOGETHER).enumerate());
        let batches = &*batches;
        let losers = fan_out(workers, || {
            let own = lock(&beside).take();
            if let Some(beside) = own {
                beside(&mut places(slab), &mut coldest_first(batches));
            }
            fill_shards(slab, &left, batches)
        });
        let losers = losers.concat();
        for loser in &losers {
            if let Some(entry) = index.slab.get_mut(loser.0) {
                entry.listed = false;
            }
        }
        index.listed = index.shards.iter().map(Shard::len).sum();
        (index, losers)
    }
}

/// Entries with their places.
pub type Places<'a> = &'a mut dyn Iterator<Item = (EntryId, Fingerprint, RowPlace)>;
/// Entries in some order.
pub type Order<'a> = &'a mut dyn Iterator<Item = EntryId>;

fn places(slab: &Chunked<IndexEntry>) -> impl Iterator<Item = (EntryId, Fingerprint, RowPlace)> {
    (0..)
        .map(EntryId)
        .zip(slab.iter())
        .filter(|(_, entry)| entry.listed)
        .map(|(id, entry)| (id, entry.fingerprint, entry.place))
}

/// Fills every piece but the last with entries that are not in use; returns their numbers.
fn fill_up(chunks: &mut [(u32, Vec<IndexEntry>)]) -> Vec<u32> {
    let unused = IndexEntry {
        fingerprint: Fingerprint([0; 2]),
        place: RowPlace {
            container: ContainerId(u32::MAX),
            row: u32::MAX,
        },
        checksum: RowChecksum(0),
        store_order: 0,
        pins: 0,
        access_time: 0,
        access_dirty: false,
        listed: false,
    };
    let mut vacant = Vec::new();
    let full = chunks.len().saturating_sub(1);
    for (first, chunk) in chunks.iter_mut().take(full) {
        let used = u32::try_from(chunk.len()).unwrap_or(CHUNK_NUMBERS);
        vacant.extend((used..CHUNK_NUMBERS).map(|at| first.saturating_add(at)));
        chunk.resize(CHUNK, unused);
    }
    vacant
}

/// Fills hash tables as long as there are any left; returns the entries of a key that lost against
/// a later store.
fn fill_shards<'shards>(
    slab: &Chunked<IndexEntry>,
    left: &Mutex<impl Iterator<Item = (usize, &'shards mut [Shard])>>,
    batches: &[Batch<'_>],
) -> Vec<EntryId> {
    let mut losers = Vec::new();
    loop {
        let next = lock(left).next();
        let Some((part, shards)) = next else {
            return losers;
        };
        let all = || {
            batches
                .iter()
                .filter_map(|batch| batch.parts.get(part))
                .flatten()
        };
        let mut counts = [0; SHARDS_TOGETHER];
        for (hash, _) in all() {
            if let Some(count) = counts.get_mut(shard_of(*hash) % SHARDS_TOGETHER) {
                *count += 1;
            }
        }
        for (shard, count) in shards.iter_mut().zip(counts) {
            shard.reserve(count, |other| hash_at(slab, *other));
        }
        for (hash, number) in all() {
            if let Some(shard) = shards.get_mut(shard_of(*hash) % SHARDS_TOGETHER) {
                insert(slab, shard, (*hash, *number), &mut losers);
            }
        }
    }
}

fn insert(
    slab: &Chunked<IndexEntry>,
    shard: &mut Shard,
    (hash, number): (u64, u32),
    losers: &mut Vec<EntryId>,
) {
    let Some(entry) = slab.get(number) else {
        return;
    };
    let same = |other: &u32| {
        slab.get(*other)
            .is_some_and(|other| other.fingerprint == entry.fingerprint)
    };
    match shard.entry(hash, same, |other| hash_at(slab, *other)) {
        hashbrown::hash_table::Entry::Vacant(vacant) => drop(vacant.insert(number)),
        hashbrown::hash_table::Entry::Occupied(mut occupied) => {
            let other = *occupied.get();
            let later = slab
                .get(other)
                .is_none_or(|other| entry.store_order >= other.store_order);
            if later {
                *occupied.get_mut() = number;
            }
            losers.push(EntryId(if later { other } else { number }));
        }
    }
}

/// The entries of all batches by last access; each batch must have been sorted.
fn coldest_first(batches: &[Batch<'_>]) -> impl Iterator<Item = EntryId> {
    let mut heads: Vec<_> = batches
        .iter()
        .map(|batch| batch.order.iter().copied().peekable())
        .collect();
    core::iter::from_fn(move || {
        let next = heads
            .iter_mut()
            .filter_map(|head| head.peek().copied().map(|of| (of, head)))
            .min_by_key(|(of, _)| *of)?;
        next.1.next().map(Recency::entry)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u32, store_order: u64) -> IndexEntry {
        IndexEntry {
            fingerprint: Fingerprint([
                u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                u64::from(number),
            ]),
            place: RowPlace {
                container: ContainerId(1),
                row: number,
            },
            checksum: RowChecksum(0),
            store_order,
            pins: 0,
            access_time: 1000 - number / 100,
            access_dirty: false,
            listed: true,
        }
    }

    #[test]
    fn batches_of_several_threads_become_one_index() {
        let numbers = ChunkNumbers::default();
        let mut batches = [Batch::new(&numbers), Batch::new(&numbers)];
        let count = u32::try_from(CHUNK).unwrap() + 500;
        for number in 0..count {
            let order = u64::from(number);
            batches[0].push(entry(number, order)).unwrap();
            batches[1].push(entry(number + count, order)).unwrap();
        }
        for batch in &mut batches {
            batch.sort();
        }
        let mut order = Vec::new();
        let mut all = Vec::new();
        let (mut index, losers) = Batch::assemble(&mut batches, 2, |entries, coldest_first| {
            all.extend(entries.map(|(id, _, _)| id));
            order.extend(coldest_first);
        });
        assert_eq!(losers, []);
        assert_eq!(index.len(), 2 * usize::try_from(count).unwrap());
        for number in 0..2 * count {
            let found = index.find(entry(number, 0).fingerprint).unwrap();
            assert_eq!(index.get(found).unwrap().place.row, number);
        }
        let accessed = |id: &EntryId| index.get(*id).unwrap();
        assert!(order.is_sorted_by_key(|id| (accessed(id).access_time, !accessed(id).store_order)));
        assert!(all.is_sorted());
        order.sort_unstable();
        assert_eq!(order, all);
        assert_eq!(order.len(), index.len());
        for number in 2 * count..3 * count {
            let new = index.insert(entry(number, 0)).unwrap();
            assert!(all.binary_search(&new).is_err(), "{new:?} is in use");
        }
    }

    #[test]
    fn of_two_entries_of_a_key_the_later_store_is_listed() {
        for later_first in [true, false] {
            let numbers = ChunkNumbers::default();
            let mut batches = [Batch::new(&numbers), Batch::new(&numbers)];
            let orders = if later_first { [9, 3] } else { [3, 9] };
            let mut ids = Vec::new();
            for (batch, order) in batches.iter_mut().zip(orders) {
                ids.push(batch.push(entry(5, order)).unwrap());
            }
            let (index, losers) = Batch::assemble(&mut batches, 1, |_, _| {});
            let (kept, lost) = if later_first { (0, 1) } else { (1, 0) };
            assert_eq!(index.find(entry(5, 0).fingerprint), Some(ids[kept]));
            assert_eq!(losers, [ids[lost]]);
            assert!(!index.get(ids[lost]).unwrap().listed);
            assert_eq!(index.len(), 1);
        }
    }
}
