//! Space on disk: what is used, what may be, and where the next row goes.

use std::io;

use crate::config::Size;
use crate::eviction::{Class, ContainerId};
use crate::format::change_page::ChangePage;
use crate::format::checksum::ChecksumKind;
use crate::format::geometry::Geometry;
use crate::format::superblock::{FileId, Superblock};
use crate::index::RowPlace;
use crate::io::file::{DataFile, FileCache};
use crate::key::GroupId;
use crate::namespace::layout;
use crate::notice::Level;
use crate::sys::fs::{Access, Direct, Directory};
use crate::sys::sync::{Arc, lock};
use crate::tier::container::Container;
use crate::tier::disk::DiskTier;
use crate::tier::foreign::ForeignFile;
use crate::tier::row_file::RowFile;
use crate::tier::rows::Rows;

/// A group's share of the capacity is cut into this many files.
pub(crate) const FILES_PER_GROUP: u64 = 32;

/// A file is made this many times smaller at most where little space is left.
const FILE_SHRINK_MAX: u64 = 64;

/// Most files that other groups give back for one new file.
const GIVE_BACK_MAX: u32 = 8;

/// What came of the wish for a new row file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// There is one more.
    Grown,
    /// The capacity, or the space to keep free, does not allow one.
    Limited,
    /// The file system refused.
    Failed,
}

/// What the root's space is used for; only the writer thread changes it.
#[derive(Debug)]
pub(crate) struct Space {
    /// Hard limit of our files in the root, in bytes.
    pub(crate) capacity_bytes: u64,
    /// What the file system keeps free.
    pub(crate) min_free: Size,
    /// Bytes that our files take: row files of all namespaces, and everything beside them.
    pub(crate) used_bytes: u64,
    /// Row files of other namespaces, the one to go first at the end.
    pub(crate) foreign: Vec<ForeignFile>,
    /// The root.
    pub(crate) root: Arc<Directory>,
    /// Directory of each class's row files.
    pub(crate) directories: Vec<Arc<Directory>>,
    /// Open descriptors.
    pub(crate) cache: Arc<FileCache>,
    /// Bytes of a new file.
    pub(crate) file_bytes: u64,
}

impl DiskTier {
    /// Reserves up to `need` rows of a class, evicting and giving files back as it must.
    ///
    /// Only as many rows are evicted as the stores take; rows stored with `first_order` or later
    /// (those of the same job) stay.
    pub(super) fn acquire_rows(
        &self,
        class: Class,
        need: usize,
        first_order: u64,
    ) -> Vec<RowPlace> {
        let mut space = lock(&self.space);
        let mut given_back = 0;
        loop {
            let free = lock(&self.state).inventory.free_rows(class);
            if free >= need {
                break;
            }
            let growth = self.grow(&mut space, class);
            if growth == Growth::Grown {
                given_back = 0;
                continue;
            }
            // A file is only taken from another group when a new one can come in its place.
            if growth == Growth::Limited
                && given_back < GIVE_BACK_MAX
                && self.give_back_colder_file(&mut space, class)
            {
                given_back += 1;
                continue;
            }
            self.evict_rows(class, need.saturating_sub(free), first_order);
            break;
        }
        lock(&self.state).inventory.take_rows(class, need)
    }

    /// Gives files back until what is there fits the capacity, which may be less than it was.
    pub(super) fn shrink_to_capacity(&self) {
        let mut space = lock(&self.space);
        self.make_room(&mut space, 0);
        while space.used_bytes > space.capacity_bytes {
            let state = lock(&self.state);
            let coldest = state
                .inventory
                .classes()
                .filter_map(|(class, files)| {
                    // A file without rows is as cold as can be.
                    let empty = files.files.iter().copied().find(|id| {
                        state
                            .inventory
                            .container(*id)
                            .is_some_and(|c| c.rows.is_unused())
                    });
                    empty
                        .map(|id| (id, 0))
                        .or_else(|| state.inventory.coldest_container(class))
                })
                .min_by_key(|(_, tick)| *tick);
            drop(state);
            if !coldest.is_some_and(|(id, _)| self.give_back(&mut space, id)) {
                return;
            }
        }
    }

    /// Evicts `short` rows of a class, or as many as can go.
    fn evict_rows(&self, class: Class, short: usize, first_order: u64) {
        let mut state = lock(&self.state);
        let mut most = short.min(state.inventory.evictable(class));
        while most > 0 {
            if let Some(victims) = state.inventory.evict(most, class, first_order) {
                self.around
                    .metrics
                    .evicted_rows
                    .add(super::disk::count(victims.len()));
                return;
            }
            // Some of them belong to this very job: fewer can go.
            most /= 2;
        }
    }

    /// Gives the coldest file of another class back if all of it is colder than the next victim
    /// of this class: that is how space moves between groups.
    fn give_back_colder_file(&self, space: &mut Space, class: Class) -> bool {
        let state = lock(&self.state);
        let own = state.inventory.coldest(class);
        let other = state
            .inventory
            .classes()
            .filter(|(of, _)| *of != class)
            .filter_map(|(of, _)| state.inventory.coldest_container(of))
            .min_by_key(|(_, tick)| *tick);
        drop(state);
        match (other, own) {
            (Some((id, tick)), Some(own)) if tick < own => self.give_back(space, id),
            (Some((id, _)), None) => self.give_back(space, id),
            _ => false,
        }
    }

    /// Evicts all rows of a file and removes it.
    fn give_back(&self, space: &mut Space, id: ContainerId) -> bool {
        let mut state = lock(&self.state);
        let Some(evicted) = state.inventory.evict_container(id) else {
            return false;
        };
        self.around
            .metrics
            .evicted_rows
            .add(super::disk::count(evicted));
        let Some(container) = state.inventory.remove_container(id) else {
            return false;
        };
        drop(state);
        self.around.metrics.evicted_files.add(1);
        self.remove_file(space, &container)
    }

    /// Unlinks a row file; a file that is gone already counts as removed.
    fn remove_file(&self, space: &mut Space, container: &Container) -> bool {
        let file = &container.row_file.file;
        let removed = file.directory().unlink(file.name());
        file.close();
        match removed {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                self.space_error(&container.row_file.path(), &error);
                return false;
            }
        }
        space.used_bytes = space.used_bytes.saturating_sub(container.allocated_bytes);
        true
    }

    /// Removes the files that vanished or were cut, once nobody uses their rows.
    pub(super) fn give_back_lost_files(&self) {
        let mut state = lock(&self.state);
        let lost: Vec<ContainerId> = state
            .inventory
            .containers()
            .filter(|(_, container)| container.lost && container.rows.is_unused())
            .map(|(id, _)| id)
            .collect();
        if lost.is_empty() {
            return;
        }
        let containers: Vec<Container> = lost
            .iter()
            .filter_map(|id| state.inventory.remove_container(*id))
            .collect();
        drop(state);
        let mut space = lock(&self.space);
        for container in &containers {
            self.remove_file(&mut space, container);
        }
    }

    /// Adds a row file for a class if the limits allow it.
    fn grow(&self, space: &mut Space, class: Class) -> Growth {
        let state = lock(&self.state);
        let Some((group, row_bytes)) = state
            .inventory
            .class(class)
            .map(|files| (files.group, files.row_bytes))
        else {
            return Growth::Failed;
        };
        drop(state);
        let Some(geometry) = self.fitting(space, group, row_bytes) else {
            return Growth::Limited;
        };
        match self.create_file(space, class, geometry) {
            Ok(Some(container)) => {
                space.used_bytes = space.used_bytes.saturating_add(container.allocated_bytes);
                lock(&self.state).inventory.add_container(container);
                Growth::Grown
            }
            Ok(None) => Growth::Limited,
            Err(error) => {
                let path = space.root.path().to_path_buf();
                self.space_error(&path, &error);
                Growth::Failed
            }
        }
    }

    /// The shape of the next file: of the usual size, or smaller where that does not fit, but not
    /// so small that a nearly full disk fills with tiny files.
    fn fitting(&self, space: &mut Space, group: GroupId, row_bytes: u64) -> Option<Geometry> {
        let mut budget = space.file_bytes;
        let mut last = None;
        loop {
            let geometry = Geometry::for_budget(group, row_bytes, budget).ok()?;
            if last == Some(geometry.row_count()) {
                return None;
            }
            if self.make_room(space, geometry.file_bytes()) {
                return Some(geometry);
            }
            last = Some(geometry.row_count());
            budget /= 2;
            if budget < space.file_bytes / FILE_SHRINK_MAX {
                return None;
            }
        }
    }

    /// Whether `bytes` more may be used, after other namespaces gave what they had to.
    fn make_room(&self, space: &mut Space, bytes: u64) -> bool {
        while space.used_bytes.saturating_add(bytes) > space.capacity_bytes {
            let Some(file) = space.foreign.pop() else {
                return false;
            };
            match file.directory.unlink(&file.name) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    self.space_error(&file.directory.path_of(&file.name), &error);
                }
                _ => {
                    self.around.metrics.evicted_files.add(1);
                    space.used_bytes = space.used_bytes.saturating_sub(file.allocated_bytes);
                }
            }
        }
        match space.root.statistics() {
            Ok(system) => {
                let min_free = space.min_free.resolve(system.total_bytes);
                system.available_bytes.saturating_sub(bytes) >= min_free
                    && system.available_bytes >= bytes
            }
            Err(error) => {
                let path = space.root.path().to_path_buf();
                self.space_error(&path, &error);
                false
            }
        }
    }

    fn space_error(&self, path: &std::path::Path, error: &io::Error) {
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Warning, "space", || {
            format!(
                "no row file can be made or removed at {}: {error}",
                path.display()
            )
        });
    }

    /// Makes a row file under a temporary name and gives it its own once its header is durable.
    ///
    /// `None` when it would take more than the capacity allows.
    fn create_file(
        &self,
        space: &Space,
        class: Class,
        geometry: Geometry,
    ) -> io::Result<Option<Container>> {
        let missing = || io::Error::other("the class has no directory");
        let directory = space
            .directories
            .get(usize::from(class.0))
            .ok_or_else(missing)?;
        let file_id = FileId(random()?);
        let name = layout::row_file_name(file_id);
        let temporary = layout::temporary_name(&name);
        let made = self.write_new_file(directory, &temporary, file_id, geometry);
        let made = made.and_then(|(superblock, allocated)| {
            if space.used_bytes.saturating_add(allocated) > space.capacity_bytes {
                directory.unlink(&temporary)?;
                return Ok(None);
            }
            directory.rename(&temporary, &name)?;
            directory.sync()?;
            Ok(Some((superblock, allocated)))
        });
        let (superblock, allocated_bytes) = match made {
            Ok(Some(made)) => made,
            Ok(None) => return Ok(None),
            Err(error) => {
                // Under one of its names at most; one that cannot go is found at the next open.
                let _ = directory.unlink(&temporary);
                let _ = directory.unlink(&name);
                return Err(error);
            }
        };
        let file = DataFile::new(Arc::clone(directory), name, Access::Write);
        let cache = Arc::clone(&space.cache);
        let row_file = RowFile::new(file, cache, superblock, true, ChangePage::default());
        Ok(Some(Container {
            row_file: Arc::new(row_file),
            class,
            rows: Rows::new(geometry.row_count()),
            allocated_bytes,
            lost: false,
            torn_after: None,
        }))
    }

    fn write_new_file(
        &self,
        directory: &Directory,
        temporary: &str,
        file_id: FileId,
        geometry: Geometry,
    ) -> io::Result<(Superblock, u64)> {
        let file = directory.create_new(temporary, Access::Write, Direct::No)?;
        file.allocate(geometry.file_bytes())?;
        let superblock = Superblock {
            namespace: self.digest,
            file_id,
            geometry,
            writer: self.writer,
            incarnation: 1,
            clean_store_order: 0,
            checksum_kind: ChecksumKind::Crc64Nvme,
        };
        file.write_all_at(&superblock.encode(), 0)?;
        file.sync_all()?;
        Ok((superblock, file.stat()?.allocated_bytes))
    }
}

/// Bytes of a new row file of a tier: a group's share of the capacity in [`FILES_PER_GROUP`]
/// files.
pub(crate) fn file_bytes(capacity_bytes: u64, groups: usize) -> u64 {
    let groups = u64::try_from(groups).unwrap_or(u64::MAX).max(1);
    capacity_bytes / FILES_PER_GROUP.saturating_mul(groups)
}

/// Sixty-four bits from the operating system.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    crate::sys::fs::fill_random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
