//! What every policy has to know of its entries: where each lies, who pins it, how many may go.

use super::containers::{Containers, Slot};
use super::{Class, ContainerId, EntryId, Placement};
use crate::chunked::{Chunked, LARGE_BITS};
use crate::sys::prefetch::prefetch;

/// So many pins are not counted any more: the entry stays pinned for good.
const PINS_LOST: u16 = u16::MAX;

/// No container: the handle is unused.
const ABSENT: Slot = Slot::MAX;

/// An entry: 12 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    container: Slot,
    /// The policy's own numbers of it.
    pub(super) node: u32,
    pub(super) list: u8,
    pub(super) mark: u8,
    pins: u16,
}

const _: () = assert!(size_of::<Record>() == 12);

const NO_RECORD: Record = Record {
    container: ABSENT,
    node: 0,
    list: 0,
    mark: 0,
    pins: 0,
};

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
    evictable: Vec<usize>,
    tick: u64,
    length: usize,
}

impl Ledger {
    fn record(&self, entry: EntryId) -> Option<&Record> {
        self.records
            .get(entry.0)
            .filter(|record| record.container != ABSENT)
    }

    /// Takes a new entry in. False for a handle that cannot be one, or that is taken.
    pub(super) fn insert(&mut self, entry: EntryId, node: u32, placement: Placement) -> bool {
        let Ok(index) = usize::try_from(entry.0) else {
            return false;
        };
        if entry.0 == u32::MAX || self.record(entry).is_some() {
            return false;
        }
        while self.records.len() <= index {
            self.records.push(NO_RECORD);
        }
        let container = self.containers.enter(placement);
        if let Some(record) = self.records.get_mut(entry.0) {
            *record = Record {
                container,
                node,
                ..NO_RECORD
            };
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
        if record.pins == 0
            && let Some(class) = self.containers.class(record.container)
        {
            self.count(class, false);
        }
        self.containers.leave(record.container, record.pins > 0);
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
            debug_assert!(record.container != ABSENT && record.pins == 0, "a victim");
            if record.container != container {
                self.containers.leave_unpinned(container, left);
                (container, left) = (record.container, 0);
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
        (record.container != ABSENT).then_some(record)
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
        self.containers.class(self.record(entry)?.container)
    }

    /// Whether an entry is there and not pinned.
    pub(super) fn is_evictable(&self, entry: EntryId) -> bool {
        self.record(entry).is_some_and(|record| record.pins == 0)
    }

    /// Tick of the last access to the entry's container: no earlier than the entry's own.
    pub(super) fn last_access(&self, entry: EntryId) -> Option<u64> {
        let record = self.record(entry)?;
        self.containers.tick_of(record.container)
    }

    /// Notes an access to an entry, for the order of containers.
    pub(super) fn accessed(&mut self, entry: EntryId) -> Option<&mut Record> {
        let record = self.records.get_mut(entry.0)?;
        if record.container == ABSENT {
            return None;
        }
        self.tick = self.tick.saturating_add(1);
        self.containers.accessed(record.container, self.tick);
        Some(record)
    }

    /// Whether accesses to entries of one request can differ in the containers they go to.
    pub(super) fn has_containers(&self) -> bool {
        self.containers.len() > 1
    }

    /// Pins an entry.
    pub(super) fn pin(&mut self, entry: EntryId) -> PinChange {
        let Some(record) = self.record(entry).copied() else {
            return PinChange::None;
        };
        if let Some(place) = self.records.get_mut(entry.0) {
            place.pins = place.pins.saturating_add(1);
        }
        if record.pins > 0 {
            return PinChange::None;
        }
        self.containers.pinned(record.container);
        if let Some(class) = self.containers.class(record.container) {
            self.count(class, false);
        }
        PinChange::Pinned(record.node)
    }

    /// Takes a pin back.
    pub(super) fn unpin(&mut self, entry: EntryId) -> PinChange {
        let Some(record) = self.record(entry).copied() else {
            return PinChange::None;
        };
        if record.pins == 0 || record.pins == PINS_LOST {
            return PinChange::None;
        }
        if let Some(place) = self.records.get_mut(entry.0) {
            place.pins -= 1;
        }
        if record.pins > 1 {
            return PinChange::None;
        }
        self.containers.unpinned(record.container);
        if let Some(class) = self.containers.class(record.container) {
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
        let own = all.filter(|(_, record)| record.container == slot);
        Some(own.map(|(number, _)| EntryId(number)).collect())
    }

    /// All entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = EntryId> + '_ {
        let all = (0..).zip(self.records.iter());
        all.filter(|(_, record)| record.container != ABSENT)
            .map(|(number, _)| EntryId(number))
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.records.memory_bytes() + self.containers.memory_bytes()
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
