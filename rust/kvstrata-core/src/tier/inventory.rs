//! What the tier has: index, eviction order, row files and their rows, changed only together.
//!
//! Pure state behind the tier's one lock: no I/O happens here, every method is short.

use std::collections::BTreeSet;

use crate::eviction::admission::Admission;
use crate::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement};
use crate::format::checksum::RowChecksum;
use crate::index::batch::Batch;
use crate::index::{Fingerprint, Index, IndexEntry, PINS_LOST, RowPlace};
use crate::key::GroupId;
use crate::sys::sync::Arc;
use crate::tier::container::Container;
use crate::tier::observed::Observed;
use crate::tier::row_file::RowFile;
use crate::tier::rows::RowUse;
use crate::tier::touched::TouchedQueue;

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
    pub(super) policy: Box<dyn EvictionPolicy>,
    /// Which rows are stored.
    pub(super) admission: Admission,
    pub(super) containers: Vec<Option<Container>>,
    classes: Vec<ClassFiles>,
    /// Pages of row tables with access times to be written.
    pub(crate) touched: TouchedQueue,
    /// Requests that callers told of.
    pub(crate) observed: Observed,
}

impl Inventory {
    /// An empty inventory for `groups` (group, payload bytes of a row).
    pub(crate) fn new(
        index: Index,
        policy: Box<dyn EvictionPolicy>,
        admission: Admission,
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
            admission,
            containers: Vec::new(),
            classes,
            touched: TouchedQueue::default(),
            observed: Observed::default(),
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
        container_at(&mut self.containers, id)
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
        let at = self
            .containers
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.containers.len());
        let id = ContainerId(u32::try_from(at).unwrap_or(u32::MAX));
        self.put_container(id, container);
        id
    }

    /// Takes a row file in under a number that no other has.
    pub(crate) fn put_container(&mut self, id: ContainerId, container: Container) {
        let class = container.class;
        let Ok(at) = usize::try_from(id.0) else {
            return;
        };
        while self.containers.len() <= at {
            self.containers.push(None);
        }
        if let Some(place) = self.containers.get_mut(at) {
            debug_assert!(place.is_none(), "two files have one number");
            *place = Some(container);
        }
        if let Some(class) = self.classes.get_mut(usize::from(class.0)) {
            class.files.insert(id);
        }
    }

    /// Takes in everything that was found at open. Rows of the files say already which entry has
    /// them.
    pub(crate) fn fill(&mut self, batches: &mut [Batch<'_>], workers: usize) {
        let (policy, containers) = (&mut self.policy, &self.containers);
        let (index, losers) = Batch::assemble(batches, workers, |places, coldest_first| {
            let mut placements = places.filter_map(|(id, fingerprint, place)| {
                let container = place.container;
                let at = usize::try_from(container.0).ok()?;
                let class = containers.get(at)?.as_ref()?.class;
                Some((id, fingerprint.tag(), Placement { class, container }))
            });
            policy.fill(&mut placements, coldest_first);
        });
        self.index = index;
        for id in losers {
            self.policy.remove(id);
            if let Some(place) = self.index.get(id).map(|entry| entry.place) {
                self.release(id, place);
            }
        }
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
            .filter(|container| container.takes_rows())
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
            let Some(container) = self.container_mut(id).filter(|c| c.takes_rows()) else {
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
        self.policy.insert(id, row.fingerprint.tag(), placement);
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
        if entry.pins == PINS_LOST {
            return None;
        }
        entry.pins = entry.pins.saturating_sub(1);
        let entry = *entry;
        if entry.listed {
            self.policy.unpin(id);
            return None;
        }
        (entry.pins == 0).then(|| self.release(id, entry.place))
    }

    /// One access of a request to rows given in token order. Those of requests that were observed
    /// were accessed when those arrived.
    pub(crate) fn access(&mut self, head_first: &[EntryId], now: u32) {
        if self.observed.is_empty() {
            self.policy.access_request(head_first);
        } else {
            let (index, observed) = (&self.index, &self.observed);
            let counts = |id: &&EntryId| {
                let entry = index.get(**id);
                entry.is_some_and(|entry| !observed.covers(entry.fingerprint))
            };
            let own: Vec<EntryId> = head_first.iter().filter(counts).copied().collect();
            self.policy.access_request(&own);
        }
        self.mark_accessed(head_first, now);
    }

    /// Lets the row tables know of an access to rows.
    pub(crate) fn mark_accessed(&mut self, head_first: &[EntryId], now: u32) {
        for id in head_first {
            let Some(entry) = self.index.get_mut(*id) else {
                continue;
            };
            if entry.access_time == now {
                continue;
            }
            entry.access_time = now;
            entry.access_dirty = true;
            let place = entry.place;
            if let Some(container) = container_at(&mut self.containers, place.container) {
                self.touched
                    .touch(place.container, &mut container.touched, place.row, now);
            }
        }
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

/// A row file, to change it.
pub(super) fn container_at(
    containers: &mut [Option<Container>],
    id: ContainerId,
) -> Option<&mut Container> {
    containers.get_mut(usize::try_from(id.0).ok()?)?.as_mut()
}
