//! What the tier has: index, eviction order, row files and their rows, changed only together.
//!
//! Pure state behind the tier's one lock: no I/O happens here, every method is short.

use std::collections::BTreeSet;

use crate::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement};
use crate::format::checksum::RowChecksum;
use crate::index::{Fingerprint, Index, IndexEntry, RowPlace};
use crate::key::GroupId;
use crate::sys::sync::Arc;
use crate::tier::container::Container;
use crate::tier::row_file::RowFile;
use crate::tier::rows::RowUse;

/// The row files of one group.
#[derive(Debug)]
pub(crate) struct ClassFiles {
    /// The group whose rows they hold.
    pub(crate) group: GroupId,
    /// Payload bytes of a row.
    pub(crate) row_bytes: u64,
    /// Its files.
    pub(crate) files: BTreeSet<ContainerId>,
    /// The file that the last rows were taken from.
    current: Option<ContainerId>,
}

/// A row that was written and is to be listed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRow {
    /// The key's fingerprint.
    pub(crate) fingerprint: Fingerprint,
    /// Where it was written.
    pub(crate) place: RowPlace,
    /// Checksum of the row.
    pub(crate) checksum: RowChecksum,
    /// Position in the order of all stores.
    pub(crate) store_order: u64,
    /// Seconds since 1970.
    pub(crate) access_time: u32,
}

/// Index, eviction order and row files of one namespace.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// Which key lies where.
    pub(crate) index: Index,
    policy: Box<dyn EvictionPolicy>,
    containers: Vec<Option<Container>>,
    classes: Vec<ClassFiles>,
}

impl Inventory {
    /// An empty inventory for `groups` (group, payload bytes of a row).
    pub(crate) fn new(
        index: Index,
        policy: Box<dyn EvictionPolicy>,
        groups: impl IntoIterator<Item = (GroupId, u64)>,
    ) -> Self {
        let classes = groups
            .into_iter()
            .map(|(group, row_bytes)| ClassFiles {
                group,
                row_bytes,
                files: BTreeSet::new(),
                current: None,
            })
            .collect();
        Self {
            index,
            policy,
            containers: Vec::new(),
            classes,
        }
    }

    /// The class of a group.
    pub(crate) fn class_of(&self, group: GroupId) -> Option<Class> {
        let at = self.classes.iter().position(|class| class.group == group)?;
        u16::try_from(at).ok().map(Class)
    }

    /// The files of a class.
    pub(crate) fn class(&self, class: Class) -> Option<&ClassFiles> {
        self.classes.get(usize::from(class.0))
    }

    /// All classes.
    pub(crate) fn classes(&self) -> impl Iterator<Item = (Class, &ClassFiles)> {
        (0_u16..).map(Class).zip(&self.classes)
    }

    /// A row file.
    pub(crate) fn container(&self, id: ContainerId) -> Option<&Container> {
        self.containers.get(usize::try_from(id.0).ok()?)?.as_ref()
    }

    /// A row file, to change it.
    pub(crate) fn container_mut(&mut self, id: ContainerId) -> Option<&mut Container> {
        self.containers
            .get_mut(usize::try_from(id.0).ok()?)?
            .as_mut()
    }

    /// All row files.
    pub(crate) fn containers(&self) -> impl Iterator<Item = (ContainerId, &Container)> {
        (0_u32..)
            .map(ContainerId)
            .zip(&self.containers)
            .filter_map(|(id, container)| Some((id, container.as_ref()?)))
    }

    /// Takes a row file in.
    pub(crate) fn add_container(&mut self, container: Container) -> ContainerId {
        let class = container.class;
        let at = self
            .containers
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.containers.len());
        if let Some(place) = self.containers.get_mut(at) {
            *place = Some(container);
        } else {
            self.containers.push(Some(container));
        }
        let id = ContainerId(u32::try_from(at).unwrap_or(u32::MAX));
        if let Some(class) = self.classes.get_mut(usize::from(class.0)) {
            class.files.insert(id);
        }
        id
    }

    /// Lets a row file without entries go.
    pub(crate) fn remove_container(&mut self, id: ContainerId) -> Option<Container> {
        let at = usize::try_from(id.0).ok()?;
        let container = self.containers.get_mut(at)?.take()?;
        if let Some(class) = self.classes.get_mut(usize::from(container.class.0)) {
            class.files.remove(&id);
            if class.current == Some(id) {
                class.current = None;
            }
        }
        Some(container)
    }

    /// Number of free rows of a class.
    pub(crate) fn free_rows(&self, class: Class) -> usize {
        let files = self.class(class).map(|class| &class.files);
        files
            .into_iter()
            .flatten()
            .filter_map(|id| self.container(*id))
            .filter(|container| !container.lost)
            .map(|container| usize::try_from(container.rows.free()).unwrap_or(usize::MAX))
            .fold(0, usize::saturating_add)
    }

    /// Reserves up to `most` free rows of a class, side by side where possible.
    pub(crate) fn take_rows(&mut self, class: Class, most: usize) -> Vec<RowPlace> {
        let Some(files) = self.classes.get(usize::from(class.0)) else {
            return Vec::new();
        };
        let order: Vec<ContainerId> = files.current.iter().chain(&files.files).copied().collect();
        let mut places = Vec::new();
        let mut rows = Vec::new();
        for id in order {
            let left = most.saturating_sub(places.len());
            if left == 0 {
                break;
            }
            let Some(container) = self.container_mut(id).filter(|container| !container.lost) else {
                continue;
            };
            rows.clear();
            container.rows.take(left, &mut rows);
            if !rows.is_empty() {
                places.extend(rows.iter().map(|row| RowPlace {
                    container: id,
                    row: *row,
                }));
                if let Some(files) = self.classes.get_mut(usize::from(class.0)) {
                    files.current = Some(id);
                }
            }
        }
        places
    }

    /// Gives a reserved row back as free; its table entry may still be there (`stale`).
    pub(crate) fn free_row(&mut self, place: RowPlace, stale: bool) {
        if let Some(container) = self.container_mut(place.container) {
            if stale {
                container.rows.set_stale(place.row, true);
            }
            container.rows.set(place.row, RowUse::Free);
        }
    }

    /// Sets a row aside for good.
    pub(crate) fn retire_row(&mut self, place: RowPlace) {
        if let Some(container) = self.container_mut(place.container) {
            container.rows.set(place.row, RowUse::Retired);
        }
    }

    /// Lists a written row as the most recent one of its class.
    ///
    /// A row listed under the same key before loses it. Returns `None`, and leaves the row
    /// reserved, when the index is full.
    pub(crate) fn publish(&mut self, row: NewRow) -> Option<EntryId> {
        let class = self.container(row.place.container)?.class;
        if let Some(older) = self.index.find(row.fingerprint) {
            self.unlist(older);
        }
        let id = self.index.insert(IndexEntry {
            fingerprint: row.fingerprint,
            place: row.place,
            class,
            checksum: row.checksum,
            store_order: row.store_order,
            pins: 0,
            access_time: row.access_time,
            access_dirty: false,
            listed: true,
        })?;
        let placement = Placement {
            class,
            container: row.place.container,
        };
        self.policy.insert(id, placement);
        if let Some(container) = self.container_mut(row.place.container) {
            container.rows.set(row.place.row, RowUse::Occupied(id));
        }
        Some(id)
    }

    /// Hides a key; its row is free at once, or when its last pin goes.
    ///
    /// Returns the row when it became free: its table entry is still on disk.
    pub(crate) fn unlist(&mut self, id: EntryId) -> Option<RowPlace> {
        let entry = *self.index.get(id)?;
        if !entry.listed {
            return None;
        }
        self.index.unlist(id);
        self.policy.remove(id);
        (entry.pins == 0).then(|| self.release(id, entry.place))
    }

    fn release(&mut self, id: EntryId, place: RowPlace) -> RowPlace {
        self.index.forget(id);
        self.free_row(place, true);
        place
    }

    /// Keeps a row as it is until [`Inventory::unpin`].
    pub(crate) fn pin(&mut self, id: EntryId) {
        if let Some(entry) = self.index.get_mut(id) {
            entry.pins = entry.pins.saturating_add(1);
            self.policy.pin(id);
        }
    }

    /// Takes one pin back; returns the row if that made it free.
    pub(crate) fn unpin(&mut self, id: EntryId) -> Option<RowPlace> {
        let entry = self.index.get_mut(id)?;
        entry.pins = entry.pins.saturating_sub(1);
        let entry = *entry;
        if entry.listed {
            self.policy.unpin(id);
            return None;
        }
        (entry.pins == 0).then(|| self.release(id, entry.place))
    }

    /// One access of a request to rows given in token order.
    pub(crate) fn access(&mut self, head_first: &[EntryId], now: u32) {
        self.policy.access_request(head_first);
        for id in head_first {
            if let Some(entry) = self.index.get_mut(*id)
                && entry.access_time != now
            {
                entry.access_time = now;
                entry.access_dirty = true;
            }
        }
    }

    /// Number of rows of a class that could be evicted now.
    pub(crate) fn evictable(&self, class: Class) -> usize {
        self.policy.evictable(class)
    }

    /// Tick of the coldest evictable row of a class.
    pub(crate) fn coldest(&self, class: Class) -> Option<u64> {
        self.policy.coldest(class)
    }

    /// The coldest file of a class without pinned rows or rows being written.
    pub(crate) fn coldest_container(&self, class: Class) -> Option<(ContainerId, u64)> {
        self.policy
            .coldest_container(class)
            .filter(|(id, _)| self.container(*id).is_some_and(|c| !c.rows.any_reserved()))
    }

    /// Frees `need` rows of a class, all or none; rows stored with `keep_from` or later stay.
    pub(crate) fn evict(
        &mut self,
        need: usize,
        class: Class,
        keep_from: u64,
    ) -> Option<Vec<RowPlace>> {
        let mut victims = Vec::with_capacity(need);
        let index = &self.index;
        let protected = |id: EntryId| {
            index
                .get(id)
                .is_some_and(|entry| entry.store_order >= keep_from)
        };
        if !self.policy.evict(need, class, &protected, &mut victims) {
            return None;
        }
        Some(self.drop_victims(&victims))
    }

    /// Frees all rows of a file, unless one is pinned or being written; returns how many.
    pub(crate) fn evict_container(&mut self, id: ContainerId) -> Option<usize> {
        if self.container(id)?.rows.any_reserved() {
            return None;
        }
        let mut victims = Vec::new();
        if !self.policy.remove_container(id, &mut victims) {
            return None;
        }
        Some(self.drop_victims(&victims).len())
    }

    fn drop_victims(&mut self, victims: &[EntryId]) -> Vec<RowPlace> {
        let mut places = Vec::with_capacity(victims.len());
        for id in victims {
            if let Some(place) = self.index.get(*id).map(|entry| entry.place) {
                self.index.unlist(*id);
                places.push(self.release(*id, place));
            }
        }
        places
    }

    /// Hides all keys of a file that is lost. Rows still pinned follow later.
    pub(crate) fn lose_container(&mut self, id: ContainerId) -> usize {
        let Some(container) = self.container_mut(id) else {
            return 0;
        };
        if container.lost {
            return 0;
        }
        container.lost = true;
        let entries: Vec<EntryId> = container.rows.occupants().collect();
        for entry in &entries {
            self.unlist(*entry);
        }
        entries.len()
    }

    /// Hides all keys: what a reset does.
    pub(crate) fn unlist_all(&mut self) {
        let all: Vec<EntryId> = self.index.listed().collect();
        for id in all {
            self.unlist(id);
        }
    }

    /// The file that holds a row.
    pub(crate) fn row_file(&self, place: RowPlace) -> Option<&Arc<RowFile>> {
        self.container(place.container)
            .map(|container| &container.row_file)
    }
}
