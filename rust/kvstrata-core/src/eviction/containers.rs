//! Row files in the order of their last access, per class.

use hashbrown::HashMap;

use super::links::{Links, List, NONE, Nodes};
use super::{Class, ContainerId, Placement};

/// Number of a container's record; entries keep it instead of the container's id.
pub(super) type Slot = u32;

#[derive(Debug)]
struct Container {
    placement: Placement,
    links: Links,
    entries: u32,
    pinned_entries: u32,
    last_access: u64,
}

impl Nodes for Vec<Container> {
    fn links(&mut self, number: u32) -> Option<&mut Links> {
        let record = self.get_mut(usize::try_from(number).ok()?)?;
        Some(&mut record.links)
    }
}

/// Containers that hold entries. One that becomes empty is forgotten.
#[derive(Debug, Default)]
pub(super) struct Containers {
    records: Vec<Container>,
    free: Vec<Slot>,
    slots: HashMap<ContainerId, Slot>,
    /// By class.
    lists: Vec<List>,
    /// The one entered last: the next entry goes there, too, as a rule.
    latest: Option<(ContainerId, Slot)>,
}

impl Containers {
    /// Whether the slot of one more container would be below a number.
    pub(super) fn has_room(&self, end: Slot) -> bool {
        usize::try_from(end).is_ok_and(|end| self.records.len() < end)
    }

    /// Counts a new entry and returns the container's slot.
    pub(super) fn enter(&mut self, placement: Placement) -> Slot {
        let slot = match self.latest {
            Some((container, slot)) if container == placement.container => slot,
            _ => match self.slots.get(&placement.container) {
                Some(slot) => *slot,
                None => self.create(placement),
            },
        };
        self.latest = Some((placement.container, slot));
        if let Some(record) = self.record_mut(slot) {
            debug_assert_eq!(
                record.placement.class, placement.class,
                "one class per container"
            );
            record.entries = record.entries.saturating_add(1);
        }
        slot
    }

    /// Counts an entry out that was pinned or not.
    pub(super) fn leave(&mut self, slot: Slot, pinned: bool) {
        if pinned {
            self.unpinned(slot);
        }
        self.leave_unpinned(slot, 1);
    }

    /// Counts entries out that were not pinned.
    pub(super) fn leave_unpinned(&mut self, slot: Slot, entries: u32) {
        let Some(record) = self.record_mut(slot) else {
            return;
        };
        record.entries = record.entries.saturating_sub(entries);
        let placement = record.placement;
        if record.entries == 0 {
            self.slots.remove(&placement.container);
            self.latest = None;
            if let Some(list) = self.lists.get_mut(usize::from(placement.class.0)) {
                list.unlink(&mut self.records, slot);
            }
            self.free.push(slot);
        }
    }

    /// Notes an access to one of the container's entries; returns their class.
    #[inline]
    pub(super) fn accessed(&mut self, slot: Slot, tick: u64) -> Option<Class> {
        let record = self.record_mut(slot)?;
        record.last_access = tick;
        let class = record.placement.class;
        if let Some(list) = self.lists.get_mut(usize::from(class.0))
            && list.warmest() != slot
        {
            list.unlink(&mut self.records, slot);
            list.push_warmest(&mut self.records, slot);
        }
        Some(class)
    }

    /// Notes an access as [`Containers::accessed`] does, but leaves the order of containers to
    /// [`Containers::sort`]; returns the class.
    pub(super) fn last_access(&mut self, slot: Slot, tick: u64) -> Option<Class> {
        let record = self.record_mut(slot)?;
        record.last_access = tick;
        Some(record.placement.class)
    }

    /// Puts all containers in the order of their last access.
    pub(super) fn sort(&mut self) {
        let mut slots: Vec<(u64, Slot)> = self
            .slots
            .values()
            .filter_map(|slot| Some((self.record(*slot)?.last_access, *slot)))
            .collect();
        slots.sort_unstable();
        for (tick, slot) in slots {
            self.accessed(slot, tick);
        }
    }

    /// Notes that one more of the container's entries is pinned.
    pub(super) fn pinned(&mut self, slot: Slot) {
        if let Some(record) = self.record_mut(slot) {
            record.pinned_entries = record.pinned_entries.saturating_add(1);
        }
    }

    /// Notes that one less of the container's entries is pinned.
    pub(super) fn unpinned(&mut self, slot: Slot) {
        if let Some(record) = self.record_mut(slot) {
            record.pinned_entries = record.pinned_entries.saturating_sub(1);
        }
    }

    /// Tick of the last access to a container.
    pub(super) fn tick_of(&self, slot: Slot) -> Option<u64> {
        self.record(slot).map(|record| record.last_access)
    }

    /// The class of a container's entries.
    pub(super) fn class(&self, slot: Slot) -> Option<Class> {
        self.record(slot).map(|record| record.placement.class)
    }

    /// The slot of a container that has entries, and whether any of them is pinned.
    pub(super) fn find(&self, container: ContainerId) -> Option<(Slot, bool)> {
        let slot = *self.slots.get(&container)?;
        self.record(slot)
            .map(|record| (slot, record.pinned_entries > 0))
    }

    /// See [`EvictionPolicy::coldest_containers`](super::EvictionPolicy::coldest_containers).
    pub(super) fn coldest(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        let mut found = Vec::new();
        let list = self.lists.get(usize::from(class.0));
        let mut slot = list.map_or(NONE, |list| list.coldest());
        while found.len() < most {
            let Some(record) = self.record(slot) else {
                break;
            };
            if record.pinned_entries == 0 {
                found.push((record.placement.container, record.last_access));
            }
            slot = record.links.warmer();
        }
        found
    }

    /// Number of containers that hold entries.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of memory held, without the allocator's own.
    pub(super) fn memory_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Container>()
            + self.free.capacity() * size_of::<Slot>()
            + self.slots.capacity() * size_of::<(ContainerId, Slot)>()
    }

    fn create(&mut self, placement: Placement) -> Slot {
        let record = Container {
            placement,
            links: Links::unlinked(),
            entries: 0,
            pinned_entries: 0,
            last_access: 0,
        };
        let slot = if let Some(slot) = self.free.pop() {
            if let Some(old) = self.record_mut(slot) {
                *old = record;
            }
            slot
        } else {
            let slot = Slot::try_from(self.records.len()).unwrap_or(NONE);
            self.records.push(record);
            slot
        };
        self.slots.insert(placement.container, slot);
        let class = usize::from(placement.class.0);
        if self.lists.len() <= class {
            self.lists.resize(class + 1, List::new());
        }
        if let Some(list) = self.lists.get_mut(class) {
            list.push_warmest(&mut self.records, slot);
        }
        slot
    }

    fn record(&self, slot: Slot) -> Option<&Container> {
        usize::try_from(slot)
            .ok()
            .and_then(|index| self.records.get(index))
    }

    fn record_mut(&mut self, slot: Slot) -> Option<&mut Container> {
        usize::try_from(slot)
            .ok()
            .and_then(|index| self.records.get_mut(index))
    }
}
