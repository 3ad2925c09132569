//! Which rows and files of an inventory may go, coldest first.

use std::collections::BTreeSet;

use crate::eviction::{Class, ContainerId, EntryId};
use crate::sys::sync::Arc;
use crate::tier::inventory::Inventory;
use crate::tier::row_file::RowFile;

impl Inventory {
    /// Number of rows of a class that could be evicted now.
    pub(crate) fn evictable(&self, class: Class) -> usize {
        let all = self.policy.evictable(class);
        let files = || {
            let files = self.class(class).map(|class| &class.files);
            let ids = files.into_iter().flatten();
            ids.filter_map(|id| self.container(*id))
        };
        if !files().any(|container| container.unwritable) {
            return all;
        }
        let occupied = files()
            .filter(|container| !container.unwritable)
            .map(|container| usize::try_from(container.rows.occupied()).unwrap_or(usize::MAX))
            .fold(0, usize::saturating_add);
        all.min(occupied)
    }

    /// Tick of the coldest evictable row of a class.
    pub(crate) fn coldest(&mut self, class: Class) -> Option<u64> {
        self.policy.coldest(class)
    }

    /// The tick of the latest access.
    pub(crate) fn now(&self) -> u64 {
        self.policy.now()
    }

    /// Up to `most` files of a class without pinned rows or rows being written, coldest first,
    /// each with the tick of its last access. Files that hold nothing come first, with tick 0.
    pub(crate) fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        let ids = self.class(class).map(|class| class.files.iter().copied());
        let empty = ids.into_iter().flatten().filter(|id| {
            self.container(*id)
                .is_some_and(|container| container.rows.is_unused())
        });
        let filled = self.policy.coldest_containers(class, most);
        let filled = filled.into_iter().filter(|(id, _)| {
            self.container(*id)
                .is_some_and(|container| !container.rows.any_reserved())
        });
        empty.map(|id| (id, 0)).chain(filled).take(most).collect()
    }

    /// The `need` rows of a class that go next, all or none; those of files that cannot be written
    /// stay.
    pub(crate) fn next_victims(&mut self, need: usize, class: Class) -> Option<Vec<EntryId>> {
        let (index, containers) = (&self.index, &self.containers);
        let unwritable = |id: ContainerId| {
            let at = usize::try_from(id.0).ok();
            let container = at.and_then(|at| containers.get(at)?.as_ref());
            container.is_some_and(|container| container.unwritable)
        };
        let protected = |id: EntryId| {
            let entry = index.get(id);
            entry.is_some_and(|entry| unwritable(entry.place.container))
        };
        // What requests that were observed are waiting for goes last.
        let observed = &self.observed;
        let awaited = |id: EntryId| {
            let entry = index.get(id);
            protected(id) || entry.is_some_and(|entry| observed.covers(entry.fingerprint))
        };
        if !observed.is_empty()
            && let Some(victims) = self.policy.next_victims(need, class, &awaited)
        {
            return Some(victims);
        }
        self.policy.next_victims(need, class, &protected)
    }

    /// The files of rows.
    pub(crate) fn files_of(&self, entries: &[EntryId]) -> BTreeSet<ContainerId> {
        entries
            .iter()
            .filter_map(|id| self.index.get(*id))
            .map(|entry| entry.place.container)
            .collect()
    }

    /// Frees rows that nobody pins.
    pub(crate) fn evict(&mut self, victims: &[EntryId]) {
        for id in victims {
            if let Some(entry) = self.index.get(*id).copied()
                && entry.listed
                && entry.pins == 0
            {
                self.policy.evicted(*id);
                self.unlist(*id);
            }
        }
    }

    /// Whether no row of a file is pinned or being written.
    pub(crate) fn can_evict_container(&self, id: ContainerId) -> bool {
        let is_pinned = |entry| {
            let entry = self.index.get(entry);
            entry.is_some_and(|entry| entry.pins > 0)
        };
        self.container(id).is_some_and(|container| {
            !container.rows.any_reserved() && !container.rows.occupants().any(is_pinned)
        })
    }

    /// Frees all rows of a file, unless one is pinned or being written; returns how many.
    pub(crate) fn evict_container(&mut self, id: ContainerId) -> Option<usize> {
        if !self.can_evict_container(id) {
            return None;
        }
        let victims: Vec<EntryId> = self.container(id)?.rows.occupants().collect();
        self.evict(&victims);
        Some(victims.len())
    }

    /// Lets stores take rows again of files that could not be written; returns those files.
    pub(crate) fn try_unwritable(&mut self) -> Vec<Arc<RowFile>> {
        let containers = self.containers.iter_mut().flatten();
        containers
            .filter_map(|container| {
                core::mem::take(&mut container.unwritable).then(|| Arc::clone(&container.row_file))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::admission::{Admission, AdmissionOptions};
    use crate::format::change_page::ChangePage;
    use crate::format::checksum::{ChecksumKind, RowChecksum};
    use crate::format::geometry::Geometry;
    use crate::format::superblock::{FileId, NamespaceDigest, Superblock, WriterId};
    use crate::index::{Fingerprinter, Index, RowPlace};
    use crate::io::file::{DataFile, FileCache};
    use crate::key::{GroupId, Key};
    use crate::sys::fs::{Access, Directory, ShareMode};
    use crate::tier::container::Container;
    use crate::tier::inventory::NewRow;
    use crate::tier::rows::Rows;
    use crate::tier::state::State;
    use crate::tier::touched::TouchedPages;

    const ROWS: u32 = 50_000;
    const CLASS: Class = Class(0);

    /// An inventory of so many full files, none of which is made.
    fn full(root: &std::path::Path, files: u32) -> (Inventory, Vec<EntryId>) {
        let directory = Arc::new(Directory::open_root(root, true, ShareMode::Private).unwrap());
        let cache = Arc::new(FileCache::new(4));
        let policy = crate::eviction::create("lru").unwrap();
        let admission = Admission::new(AdmissionOptions::default(), false);
        let mut inventory =
            Inventory::new(Index::default(), policy, admission, [(GroupId(0), 4096)]);
        let fingerprinter = Fingerprinter::new([7; 16]);
        let geometry = Geometry::new(GroupId(0), 4096, ROWS).unwrap();
        let mut entries = Vec::new();
        for file in 0..files {
            let superblock = Superblock {
                namespace: NamespaceDigest([0; 32]),
                file_id: FileId(u64::from(file)),
                geometry,
                writer: WriterId([0; 16]),
                incarnation: 1,
                clean_store_order: 0,
                checksum_kind: ChecksumKind::Crc64Nvme,
            };
            let data = DataFile::new(Arc::clone(&directory), "none", Access::Write);
            let changes = ChangePage::default();
            let row_file = RowFile::new(data, Arc::clone(&cache), superblock, true, changes);
            inventory.add_container(Container {
                row_file: Arc::new(row_file),
                class: CLASS,
                rows: Rows::new(ROWS),
                allocated_bytes: geometry.file_bytes(),
                touched: TouchedPages::default(),
                unwritable: false,
                lost: false,
                torn_after: None,
            });
            for place in inventory.take_rows(CLASS, usize::try_from(ROWS).unwrap()) {
                entries.push(publish(&mut inventory, &fingerprinter, place));
            }
        }
        (inventory, entries)
    }

    fn publish(inventory: &mut Inventory, of: &Fingerprinter, place: RowPlace) -> EntryId {
        let mut key = [0; 36];
        key[..4].copy_from_slice(&place.container.0.to_le_bytes());
        key[4..8].copy_from_slice(&place.row.to_le_bytes());
        let new = NewRow {
            fingerprint: of.of(&Key::new(&key).unwrap()),
            place,
            checksum: RowChecksum(0),
            store_order: u64::from(place.row),
            access_time: 0,
        };
        inventory.publish(new).unwrap()
    }

    /// Ten thousand stores that find all rows in use, then one that finds one that is not.
    fn stores_against_rows_in_use(files: u32) {
        let place = tempfile::tempdir().unwrap();
        let (mut inventory, entries) = full(place.path(), files);
        let all = u64::from(files) * u64::from(ROWS);
        assert_eq!(u64::try_from(entries.len()), Ok(all));
        for entry in &entries {
            inventory.pin(*entry);
        }
        for _ in 0..10_000 {
            assert_eq!(inventory.free_rows(CLASS), 0);
            assert_eq!(inventory.coldest(CLASS), None);
            assert_eq!(inventory.evictable(CLASS), 0);
            assert_eq!(inventory.next_victims(1, CLASS), None);
            assert!(inventory.coldest_containers(CLASS, 8).is_empty());
            assert!(inventory.take_rows(CLASS, 1).is_empty());
        }
        assert_eq!(inventory.policy.visited(), 0);
        // Where one row can go, those in use at the cold end are passed once.
        let last = *entries.last().unwrap();
        inventory.unpin(last);
        for _ in 0..1000 {
            assert!(inventory.coldest(CLASS).is_some());
            let victims = inventory.next_victims(1, CLASS);
            assert_eq!(victims, Some(vec![last]));
        }
        assert_eq!(inventory.policy.visited(), all - 1 + 2000);
    }

    #[test]
    fn a_store_that_finds_every_row_in_use_looks_at_none_of_them() {
        stores_against_rows_in_use(1);
    }

    #[test]
    fn rows_that_stay_for_a_store_are_met_once_however_often_victims_are_looked_for() {
        let place = tempfile::tempdir().unwrap();
        let (inventory, entries) = full(place.path(), 1);
        let mut state = State::new(inventory, None, 1, 1);
        let store = state.removals.ask();
        let (kept, others) = entries.split_at(20_000);
        for entry in kept {
            state.keep(*entry, store);
        }
        for own in others.chunks(100) {
            assert_eq!(
                state.inventory.next_victims(100, CLASS).as_deref(),
                Some(own)
            );
            state.inventory.evict(own);
        }
        assert_eq!(state.inventory.next_victims(1, CLASS), None);
        let met = u64::from(ROWS);
        assert!(state.inventory.policy.visited() < met + 2 * 300);
        // A removed one is free at once, the others go when the store is planned.
        state.drop_entry(entries[7]);
        assert_eq!(state.clears.len(), 1);
        state.let_all_go();
        assert_eq!(state.inventory.evictable(CLASS), kept.len() - 1);
        let coldest = state.inventory.next_victims(8, CLASS).unwrap();
        assert_eq!(coldest, [0, 1, 2, 3, 4, 5, 6, 8].map(|at| entries[at]));
    }

    #[test]
    #[ignore = "makes a million rows"]
    fn a_store_that_finds_a_million_rows_in_use_looks_at_none_of_them() {
        stores_against_rows_in_use(20);
    }
}
