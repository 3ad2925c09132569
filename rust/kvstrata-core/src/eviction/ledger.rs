//! What every policy has to know of its entries: where each lies, who pins it, how many may go.

use hashbrown::HashMap;

use super::containers::{Containers, Slot};
use super::{Class, ContainerId, EntryId, Placement};
use crate::chunked::{Chunked, LARGE_BITS};
use crate::sys::prefetch::prefetch;

/// No container: the handle is unused.
const ABSENT: Slot = (1 << 28) - 1;
/// Bits of [`Record::container`] above the slot.
const LIST: u32 = 1 << 28;
const MARK_SHIFT: u32 = 29;
const MARK: u32 = 0b11 << MARK_SHIFT;
const PINNED: u32 = 1 << 31;

/// An entry: 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// The policy's own number of it.
    pub(super) node: u32,
    /// The slot of its container, which list it is in, its mark, and whether it is pinned.
    container: u32,
}

const _: () = assert!(size_of::<Record>() == 8);

const NO_RECORD: Record = Record {
    node: 0,
    container: ABSENT,
};

impl Record {
    const fn slot(self) -> Slot {
        self.container & ABSENT
    }

    const fn is_there(self) -> bool {
        self.slot() != ABSENT
    }

    const fn is_pinned(self) -> bool {
        self.container & PINNED != 0
    }

    /// Which of two lists it is in.
    pub(super) const fn is_in_second(self) -> bool {
        self.container & LIST != 0
    }

    pub(super) const fn set_in_second(&mut self, is_in_second: bool) {
        self.container &= !LIST;
        if is_in_second {
            self.container |= LIST;
        }
    }

    /// A number of the policy's, of two bits.
    pub(super) fn mark(self) -> u8 {
        u8::try_from((self.container & MARK) >> MARK_SHIFT).unwrap_or(0)
    }

    pub(super) fn set_mark(&mut self, mark: u8) {
        self.container = self.container & !MARK | u32::from(mark) << MARK_SHIFT & MARK;
    }
}

/// What became of a pin or its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinChange {
    /// Nothing changed for eviction.
    None,
    /// The entry may not be a victim any more.
    Pinned(u32),
    /// The entry may be a victim again.
    Free(u32),
}

/// Entries by handle, with exact counts by class. A policy keeps its order beside it and hands
/// each entry a node, a number of its own.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    records: Chunked<Record, LARGE_BITS>,
    containers: Containers,
    /// Pins beyond the first of those entries that have them.
    more_pins: HashMap<u32, u32>,
    evictable: Vec<usize>,
    tick: u64,
    length: usize,
}

impl Ledger {
    fn record(&self, entry: EntryId) -> Option<&Record> {
        let record = self.records.get(entry.0);
        record.filter(|record| record.is_there())
    }

    /// Takes a new entry in. False for a handle that cannot be one, or that is taken.
    pub(super) fn insert(&mut self, entry: EntryId, node: u32, placement: Placement) -> bool {
        let Ok(index) = usize::try_from(entry.0) else {
            return false;
        };
        if entry.0 == u32::MAX || self.record(entry).is_some() || !self.containers.has_room(ABSENT)
        {
            return false;
        }
        while self.records.len() <= index {
            self.records.push(NO_RECORD);
        }
        let container = self.containers.enter(placement);
        if let Some(record) = self.records.get_mut(entry.0) {
            *record = Record { node, container };
        }
        self.length += 1;
        let tick = self.next_tick();
        self.containers.accessed(container, tick);
        self.count(placement.class, true);
        true
    }

    /// Forgets an entry; returns its node.
    pub(super) fn remove(&mut self, entry: EntryId) -> Option<u32> {
        let record = *self.record(entry)?;
        if record.is_pinned() {
            self.more_pins.remove(&entry.0);
        } else if let Some(class) = self.containers.class(record.slot()) {
            self.count(class, false);
        }
        self.containers.leave(record.slot(), record.is_pinned());
        if let Some(place) = self.records.get_mut(entry.0) {
            *place = NO_RECORD;
        }
        self.length = self.length.saturating_sub(1);
        Some(record.node)
    }

    /// Forgets unpinned entries of a class; `gone` is told what each was.
    pub(super) fn forget(
        &mut self,
        class: Class,
        entries: &[EntryId],
        mut gone: impl FnMut(EntryId, Record),
    ) {
        let (mut container, mut left) = (ABSENT, 0);
        for entry in entries {
            let Some(place) = self.records.get_mut(entry.0) else {
                continue;
            };
            let record = core::mem::replace(place, NO_RECORD);
            debug_assert!(record.is_there() && !record.is_pinned(), "a victim");
            if record.slot() != container {
                self.containers.leave_unpinned(container, left);
                (container, left) = (record.slot(), 0);
            }
            left += 1;
            gone(*entry, record);
        }
        self.containers.leave_unpinned(container, left);
        self.length = self.length.saturating_sub(entries.len());
        if let Some(count) = self.evictable.get_mut(usize::from(class.0)) {
            *count = count.saturating_sub(entries.len());
        }
    }

    /// An entry.
    pub(super) fn get(&self, entry: EntryId) -> Option<&Record> {
        self.record(entry)
    }

    /// An entry, to change the policy's numbers of it.
    pub(super) fn get_mut(&mut self, entry: EntryId) -> Option<&mut Record> {
        let record = self.records.get_mut(entry.0)?;
        record.is_there().then_some(record)
    }

    /// Fetches an entry: it will be looked at soon.
    pub(super) fn prefetch(&self, entry: EntryId) {
        prefetch(self.records.get(entry.0));
    }

    /// The node of an entry.
    pub(super) fn node(&self, entry: EntryId) -> Option<u32> {
        self.record(entry).map(|record| record.node)
    }

    /// The class of an entry.
    pub(super) fn class(&self, entry: EntryId) -> Option<Class> {
        self.containers.class(self.record(entry)?.slot())
    }

    /// Whether an entry is there and not pinned.
    pub(super) fn is_evictable(&self, entry: EntryId) -> bool {
        self.record(entry).is_some_and(|record| !record.is_pinned())
    }

    /// Tick of the last access to the entry's container: no earlier than the entry's own.
    pub(super) fn last_access(&self, entry: EntryId) -> Option<u64> {
        let record = self.record(entry)?;
        self.containers.tick_of(record.slot())
    }

    /// Notes an access to an entry, for the order of containers.
    pub(super) fn accessed(&mut self, entry: EntryId) -> Option<&mut Record> {
        let record = self.records.get_mut(entry.0)?;
        if !record.is_there() {
            return None;
        }
        self.tick = self.tick.saturating_add(1);
        self.containers.accessed(record.slot(), self.tick);
        Some(record)
    }

    /// Whether accesses to entries of one request can differ in the containers they go to.
    pub(super) fn has_containers(&self) -> bool {
        self.containers.len() > 1
    }

    /// Pins an entry.
    pub(super) fn pin(&mut self, entry: EntryId) -> PinChange {
        let Some(record) = self.get_mut(entry) else {
            return PinChange::None;
        };
        if record.is_pinned() {
            let more = self.more_pins.entry(entry.0).or_insert(0);
            *more = more.saturating_add(1);
            return PinChange::None;
        }
        record.container |= PINNED;
        let record = *record;
        self.containers.pinned(record.slot());
        if let Some(class) = self.containers.class(record.slot()) {
            self.count(class, false);
        }
        PinChange::Pinned(record.node)
    }

    /// Takes a pin back.
    pub(super) fn unpin(&mut self, entry: EntryId) -> PinChange {
        if !self.more_pins.is_empty()
            && let Some(more) = self.more_pins.get_mut(&entry.0)
        {
            *more -= 1;
            if *more == 0 {
                self.more_pins.remove(&entry.0);
            }
            return PinChange::None;
        }
        let record = self.get_mut(entry).filter(|record| record.is_pinned());
        let Some(record) = record else {
            return PinChange::None;
        };
        record.container &= !PINNED;
        let record = *record;
        self.containers.unpinned(record.slot());
        if let Some(class) = self.containers.class(record.slot()) {
            self.count(class, true);
        }
        PinChange::Free(record.node)
    }

    /// Number of unpinned entries of a class.
    pub(super) fn evictable(&self, class: Class) -> usize {
        let count = self.evictable.get(usize::from(class.0));
        count.copied().unwrap_or(0)
    }

    /// The next tick.
    pub(super) fn next_tick(&mut self) -> u64 {
        self.tick = self.tick.saturating_add(1);
        self.tick
    }

    /// The latest tick.
    pub(super) const fn now(&self) -> u64 {
        self.tick
    }

    /// Number of entries.
    pub(super) const fn len(&self) -> usize {
        self.length
    }

    /// See [`EvictionPolicy::coldest_containers`](super::EvictionPolicy::coldest_containers).
    pub(super) fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        self.containers.coldest(class, most)
    }

    /// The entries of a container; `None` if one of them is pinned.
    pub(super) fn unpinned_entries_of(&self, container: ContainerId) -> Option<Vec<EntryId>> {
        let Some((slot, pinned)) = self.containers.find(container) else {
            return Some(Vec::new());
        };
        if pinned {
            return None;
        }
        let all = (0..).zip(self.records.iter());
        let own = all.filter(|(_, record)| record.slot() == slot);
        Some(own.map(|(number, _)| EntryId(number)).collect())
    }

    /// All entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = EntryId> + '_ {
        let all = (0..).zip(self.records.iter());
        all.filter(|(_, record)| record.is_there())
            .map(|(number, _)| EntryId(number))
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        let more_pins = self.more_pins.capacity() * size_of::<(u32, u32)>();
        self.records.memory_bytes() + self.containers.memory_bytes() + more_pins
    }

    fn count(&mut self, class: Class, more: bool) {
        let at = usize::from(class.0);
        if self.evictable.len() <= at {
            self.evictable.resize(at.saturating_add(1), 0);
        }
        if let Some(count) = self.evictable.get_mut(at) {
            *count = if more {
                count.saturating_add(1)
            } else {
                count.saturating_sub(1)
            };
        }
    }
}
