//! New row files.

use std::io;

use crate::eviction::Class;
use crate::format::change_page::ChangePage;
use crate::format::checksum::ChecksumKind;
use crate::format::geometry::Geometry;
use crate::format::superblock::{FileId, Superblock};
use crate::io::file::DataFile;
use crate::key::GroupId;
use crate::namespace::layout;
use crate::sys::fs::{Access, Direct, Directory};
use crate::sys::sync::{Arc, lock};
use crate::tier::container::Container;
use crate::tier::disk::DiskTier;
use crate::tier::row_file::RowFile;
use crate::tier::rows::Rows;
use crate::tier::space::{Room, Space, committed_bytes};
use crate::tier::starved::Limit;
use crate::tier::touched::TouchedPages;

/// A file is made this many times smaller at most where little space is left.
const FILE_SHRINK_MAX: u64 = 64;

/// What came of the wish for a new row file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// There is one more.
    Grown,
    /// The capacity, or the space to keep free, does not allow one, or the disk is full.
    Limited,
    /// The file system refused.
    Failed,
}

/// A file that was just made.
struct Made {
    superblock: Superblock,
    /// What it takes, or will when all its rows are written.
    allocated_bytes: u64,
}

impl DiskTier {
    /// Adds a row file for a class if the limits allow it.
    pub(super) fn grow(&self, space: &mut Space, class: Class) -> Growth {
        let Some((group, row_bytes)) = self.shape(class) else {
            return Growth::Failed;
        };
        if self.is_at_capacity(space, class) {
            space.limit = Some(Limit::Capacity);
            return Growth::Limited;
        }
        // A second time when a name that came made the directory larger by just what was left.
        for _ in 0..2 {
            let Some(geometry) = self.fitting(space, group, row_bytes) else {
                return Growth::Limited;
            };
            match self.create_file(space, class, geometry) {
                Ok(Some(container)) => {
                    space.used_bytes = space.used_bytes.saturating_add(container.allocated_bytes);
                    lock(&self.state).inventory.add_container(container);
                    self.note_grown(space, class);
                    return Growth::Grown;
                }
                Ok(None) => {}
                Err(error) if is_full(&error) => {
                    space.limit = Some(self.full(space, &geometry, &error));
                    return Growth::Limited;
                }
                Err(error) => {
                    let path = space.root.path().to_path_buf();
                    self.space_error(&path, &error);
                    return Growth::Failed;
                }
            }
        }
        space.limit = Some(Limit::Capacity);
        Growth::Limited
    }

    /// Whether it is plain without a look at the file system that a class has all the files it can
    /// have: that look is one at every row file.
    fn is_at_capacity(&self, space: &Space, class: Class) -> bool {
        let shape = {
            let state = lock(&self.state);
            let files = state.inventory.class(class);
            let files = files.filter(|files| !files.files.is_empty());
            files.map(|files| (files.group, files.row_bytes))
        };
        shape.is_some_and(|shape| {
            let room = space.boundless_room();
            space.foreign.is_empty() && space.limit_of(&room, shape) == Some(Limit::Capacity)
        })
    }

    /// What it means that the file system has no space for a file.
    fn full(&self, space: &Space, geometry: &Geometry, error: &io::Error) -> Limit {
        let room = self.room(space);
        let fits = room.is_ok_and(|room| room.takes(committed_bytes(geometry)));
        match error.raw_os_error() {
            Some(number) if fits => Limit::Refused(number),
            _ => Limit::Disk,
        }
    }

    /// Group and payload bytes of a class.
    pub(super) fn shape(&self, class: Class) -> Option<(GroupId, u64)> {
        let state = lock(&self.state);
        let files = state.inventory.class(class)?;
        Some((files.group, files.row_bytes))
    }

    /// The shape of the next file: of the usual size, or smaller where that does not fit, but not
    /// so small that a nearly full disk fills with tiny files. Other namespaces make room first.
    fn fitting(&self, space: &mut Space, group: GroupId, row_bytes: u64) -> Option<Geometry> {
        let usual = Geometry::for_budget(group, row_bytes, space.file_bytes).ok()?;
        let room = match self.make_room(space, committed_bytes(&usual)) {
            Ok(room) => room,
            Err(error) => {
                let path = space.root.path().to_path_buf();
                self.space_error(&path, &error);
                return None;
            }
        };
        match fitting(&room, space.file_bytes, group, row_bytes) {
            Ok(geometry) => Some(geometry),
            Err(limit) => {
                space.limit = limit;
                None
            }
        }
    }

    /// Makes a row file under a temporary name and gives it its own once its header is durable.
    ///
    /// `None` when it would take more than the capacity allows.
    fn create_file(
        &self,
        space: &mut Space,
        class: Class,
        geometry: Geometry,
    ) -> io::Result<Option<Container>> {
        let missing = || io::Error::other("the class has no directory");
        let directory = space
            .directories
            .get(usize::from(class.0))
            .map(Arc::clone)
            .ok_or_else(missing)?;
        let before = directory.allocated_bytes()?;
        let file_id = FileId(random()?);
        let name = layout::row_file_name(file_id);
        let temporary = layout::temporary_name(&name);
        let made = self.write_new_file(&directory, &temporary, file_id, geometry);
        let made = made.and_then(|made| {
            directory.rename(&temporary, &name)?;
            directory.sync()?;
            Ok(made)
        });
        // Names take blocks too; a directory never gives them back.
        let names = directory.allocated_bytes().unwrap_or(before);
        let names = names.saturating_sub(before);
        space.used_bytes = space.used_bytes.saturating_add(names);
        // Under one of its names at most. One that cannot go is found at the next open, and counts
        // until then.
        let discard = |space: &mut Space| {
            let stays = [&temporary, &name].into_iter().any(|name| {
                let removed = directory.unlink(name);
                removed.is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
            });
            if stays {
                let bytes = committed_bytes(&geometry);
                space.used_bytes = space.used_bytes.saturating_add(bytes);
            }
        };
        let made = match made {
            Ok(made) => made,
            Err(error) => {
                discard(space);
                return Err(error);
            }
        };
        if space.used_bytes.saturating_add(made.allocated_bytes) > space.capacity_bytes {
            discard(space);
            return Ok(None);
        }
        let file = DataFile::new(directory, name, Access::Write);
        let cache = Arc::clone(&space.cache);
        let row_file = RowFile::new(file, cache, made.superblock, true, ChangePage::default());
        Ok(Some(Container {
            row_file: Arc::new(row_file),
            class,
            rows: Rows::new(geometry.row_count()),
            allocated_bytes: made.allocated_bytes,
            touched: TouchedPages::default(),
            unwritable: false,
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
    ) -> io::Result<Made> {
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
        let allocated_bytes = file.stat()?.allocated_bytes.max(committed_bytes(&geometry));
        Ok(Made {
            superblock,
            allocated_bytes,
        })
    }
}

impl Space {
    /// The room there would be if the capacity were the only limit.
    pub(super) fn boundless_room(&self) -> Room {
        Room {
            capacity_bytes: i128::from(self.capacity_bytes) - i128::from(self.used_bytes),
            free_bytes: i128::from(u64::MAX),
            min_free_bytes: 0,
            inodes: i128::from(u64::MAX),
        }
    }

    /// Whether a file of this group and row size could be made if there was this room.
    pub(super) fn could_grow(&self, room: &Room, (group, row_bytes): (GroupId, u64)) -> bool {
        self.limit_of(room, (group, row_bytes)).is_none()
    }

    /// What would keep the smallest file of this group and row size from being made.
    pub(super) fn limit_of(
        &self,
        room: &Room,
        (group, row_bytes): (GroupId, u64),
    ) -> Option<Limit> {
        let fits = fitting(room, self.file_bytes, group, row_bytes);
        fits.err().map(|limit| limit.unwrap_or(Limit::Capacity))
    }
}

/// The largest of the usual size and its halves that fits the room.
///
/// # Errors
/// What keeps the smallest of them from being made; `None` where it has no shape.
fn fitting(
    room: &Room,
    usual_bytes: u64,
    group: GroupId,
    row_bytes: u64,
) -> Result<Geometry, Option<Limit>> {
    let mut budget = usual_bytes;
    let mut last = None;
    let mut limit = None;
    loop {
        let geometry = Geometry::for_budget(group, row_bytes, budget).map_err(|_| None)?;
        if last == Some(geometry.row_count()) {
            return Err(limit);
        }
        limit = room.limit(committed_bytes(&geometry));
        if limit.is_none() {
            return Ok(geometry);
        }
        last = Some(geometry.row_count());
        budget /= 2;
        if budget < usual_bytes / FILE_SHRINK_MAX {
            return Err(limit);
        }
    }
}

/// Whether there is no space, or no more for this user.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    )
}

/// Sixty-four bits from the operating system.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    crate::sys::fs::fill_random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
