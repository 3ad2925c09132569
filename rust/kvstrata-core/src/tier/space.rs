//! Space on disk: what is used, what may be, and where the next row goes.

use std::io;

use crate::config::Size;
use crate::eviction::Class;
use crate::format::geometry::Geometry;
use crate::index::RowPlace;
use crate::io::Direction;
use crate::io::file::FileCache;
use crate::metrics::count;
use crate::notice::Level;
use crate::sys::fs::{Directory, FileSystem};
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::foreign::ForeignFile;
use crate::tier::growth::Growth;
use crate::tier::last_error::Cause;
use crate::tier::starved::Limit;

/// A group's share of the capacity is cut into this many files.
pub(crate) const FILES_PER_GROUP: u64 = 32;

/// Of a file system's inodes, one in this many is left to others, but not more than
/// [`INODES_KEPT_MAX`].
const INODES_KEPT_SHARE: u64 = 50;
/// Most inodes that are left to others.
const INODES_KEPT_MAX: u64 = 4096;

/// What the root's space is used for; only the writer thread changes it.
#[derive(Debug)]
pub(crate) struct Space {
    /// Hard limit of our files in the root, in bytes.
    pub(crate) capacity_bytes: u64,
    /// What the file system keeps free.
    pub(crate) min_free: Size,
    /// Bytes that our files take, or will when all their rows are written: row files of all
    /// namespaces, and everything beside them.
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
    /// What kept the last new row file from being made.
    pub(crate) limit: Option<Limit>,
    /// Classes of which no row can be stored for want of space.
    pub(crate) starved: Vec<Class>,
}

/// What the limits leave, in bytes and files; negative where a limit is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Under the capacity.
    pub(crate) capacity_bytes: i128,
    /// Above the space to keep free.
    pub(crate) free_bytes: i128,
    /// That space.
    pub(crate) min_free_bytes: u64,
    /// Above the inodes to keep free; none are counted where the file system has no number.
    pub(crate) inodes: i128,
}

impl Room {
    /// The room on a file system under these limits. `promised_bytes` are those that
    /// row files may still take.
    pub(crate) fn new(space: &Space, system: &FileSystem, promised_bytes: u64) -> Self {
        let min_free = space.min_free.resolve(system.total_bytes);
        let inodes = i128::from(system.inodes_free) - i128::from(inodes_kept(system));
        Self {
            capacity_bytes: i128::from(space.capacity_bytes) - i128::from(space.used_bytes),
            free_bytes: i128::from(system.available_bytes)
                - i128::from(promised_bytes)
                - i128::from(min_free),
            min_free_bytes: min_free,
            inodes: if system.inodes_total == 0 {
                i128::from(u64::MAX)
            } else {
                inodes
            },
        }
    }

    /// Whether a file that takes `bytes` may be made.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        self.limit(bytes).is_none()
    }

    /// What keeps a file that takes `bytes` from being made.
    pub(crate) fn limit(&self, bytes: u64) -> Option<Limit> {
        let whole = i128::from(bytes);
        if self.free_bytes + i128::from(self.min_free_bytes) < whole {
            Some(Limit::Disk)
        } else if self.free_bytes < whole {
            Some(Limit::MinFree)
        } else if self.inodes < 1 {
            Some(Limit::Inodes)
        } else if self.capacity_bytes < whole {
            Some(Limit::Capacity)
        } else {
            None
        }
    }

    /// Whether a limit is broken.
    pub(crate) const fn is_short(&self) -> bool {
        self.capacity_bytes < 0 || self.free_bytes < 0 || self.inodes < 0
    }

    /// The room once a file is gone. File systems may report freed space late, so what was freed is
    /// added to what was asked once.
    pub(crate) fn without(self, file: &Freed) -> Self {
        Self {
            capacity_bytes: self.capacity_bytes + i128::from(file.counted_bytes),
            free_bytes: self.free_bytes + i128::from(file.disk_bytes),
            inodes: self.inodes + 1,
            ..self
        }
    }
}

/// Inodes of a file system that are left to others.
pub(super) fn inodes_kept(system: &FileSystem) -> u64 {
    (system.inodes_total / INODES_KEPT_SHARE).min(INODES_KEPT_MAX)
}

/// What a file that is gone has freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Freed {
    /// Of the capacity.
    pub(crate) counted_bytes: u64,
    /// Of the disk.
    pub(crate) disk_bytes: u64,
}

impl DiskTier {
    /// Reserves up to `need` rows of a class, evicting and giving files back as it must.
    ///
    /// Only as many rows are evicted as are needed.
    pub(super) fn acquire_rows(&self, class: Class, need: usize) -> Vec<RowPlace> {
        let mut space = lock(&self.space);
        let mut may_take_over = true;
        loop {
            let free = lock(&self.state).inventory.free_rows(class);
            if free >= need {
                break;
            }
            let growth = self.grow(&mut space, class);
            if growth == Growth::Grown {
                may_take_over = true;
                continue;
            }
            // Once for each new file: the file system may be late to say that space is free.
            if growth == Growth::Limited
                && core::mem::take(&mut may_take_over)
                && self.take_over_files(&mut space, class, need.saturating_sub(free))
            {
                continue;
            }
            if growth == Growth::Limited {
                self.note_limited(&mut space, class);
            }
            drop(space);
            self.evict_rows(class, need.saturating_sub(free));
            break;
        }
        lock(&self.state).inventory.take_rows(class, need)
    }

    /// Evicts `short` rows of a class, or as many as can go.
    ///
    /// A row goes only once its file is known to be writable: else it would go for nothing.
    fn evict_rows(&self, class: Class, short: usize) {
        let mut left = short;
        while left > 0 {
            if self.health.refuses(Direction::Write) {
                return;
            }
            let mut state = lock(&self.state);
            let inventory = &mut state.inventory;
            let mut most = left.min(inventory.evictable(class));
            let mut victims = None;
            while most > 0 && victims.is_none() {
                victims = inventory.next_victims(most, class);
                // Some are in files that cannot be written: fewer can go.
                most /= 2;
            }
            let Some(victims) = victims else {
                return;
            };
            let untried: Vec<_> = inventory
                .files_of(&victims)
                .into_iter()
                .filter_map(|id| Some((id, Arc::clone(&inventory.container(id)?.row_file))))
                .filter(|(_, file)| !file.is_raised())
                .collect();
            if untried.is_empty() {
                inventory.evict(&victims);
                self.around.metrics.evicted_rows.add(count(victims.len()));
                left = left.saturating_sub(victims.len());
                continue;
            }
            drop(state);
            for (id, file) in untried {
                if let Err(error) = file.raise_incarnation(self.writer) {
                    self.cannot_write(id, &error);
                }
            }
        }
    }

    /// What the limits leave now.
    pub(super) fn room(&self, space: &Space) -> io::Result<Room> {
        // In this order: what is written in between counts twice rather than not at all.
        let promised_bytes = self.promised_bytes();
        let system = space.root.statistics()?;
        Ok(Room::new(space, &system, promised_bytes))
    }

    /// Bytes that row files count with and the file system does not hold for them yet: rows of
    /// sparse files that are not written, extents that are not split.
    fn promised_bytes(&self) -> u64 {
        let state = lock(&self.state);
        let files: Vec<_> = state
            .inventory
            .containers()
            .filter(|(_, container)| !container.lost)
            .map(|(_, container)| (container.allocated_bytes, Arc::clone(&container.row_file)))
            .collect();
        drop(state);
        files
            .iter()
            .map(|(bytes, row_file)| {
                let file = &row_file.file;
                let written = file.directory().stat(file.name());
                bytes.saturating_sub(written.map_or(0, |stat| stat.allocated_bytes))
            })
            .fold(0, u64::saturating_add)
    }

    pub(super) fn space_error(&self, path: &std::path::Path, error: &io::Error) {
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Warning, "space", || {
            format!(
                "no row file can be made or removed at {}: {error}",
                path.display()
            )
        });
        self.device_failed(
            Direction::Write,
            Cause::of(error),
            "make or remove a row file",
            path,
        );
    }
}

/// Most that a row file will ever take on the file system.
///
/// Writing a part of the rows of a reserved file splits its extents; more than four do not fit into
/// an inode of ext4, and each further block holds 340 of them.
pub(crate) fn committed_bytes(geometry: &Geometry) -> u64 {
    let extents = u64::from(geometry.row_count()).saturating_add(2);
    let blocks = if extents > 4 {
        extents.div_ceil(340)
    } else {
        0
    };
    geometry
        .file_bytes()
        .saturating_add(blocks.saturating_mul(4096))
}

/// Bytes of a new row file of a tier: a group's share of the capacity, or of the disk where that
/// is smaller, in [`FILES_PER_GROUP`] files.
pub(crate) fn file_bytes(capacity_bytes: u64, groups: usize) -> u64 {
    let groups = u64::try_from(groups).unwrap_or(u64::MAX).max(1);
    capacity_bytes / FILES_PER_GROUP.saturating_mul(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::GroupId;

    fn room(capacity_bytes: i128, free_bytes: i128, inodes: i128) -> Room {
        Room {
            capacity_bytes,
            free_bytes,
            min_free_bytes: 1000,
            inodes,
        }
    }

    #[test]
    fn what_keeps_a_file_from_being_made_has_a_name() {
        assert_eq!(room(100, 100, 1).limit(100), None);
        for (short, limit) in [
            (room(99, 100, 1), Limit::Capacity),
            (room(100, 99, 1), Limit::MinFree),
            (room(99, -900, 0), Limit::MinFree),
            (room(99, -901, 0), Limit::Disk),
            (room(100, 100, 0), Limit::Inodes),
        ] {
            assert_eq!(short.limit(100), Some(limit), "{short:?}");
        }
    }

    #[test]
    fn a_file_needs_room_under_every_limit_and_an_inode() {
        assert!(room(100, 100, 1).takes(100));
        for short in [room(99, 100, 1), room(100, 99, 1), room(100, 100, 0)] {
            assert!(!short.takes(100), "{short:?}");
        }
    }

    #[test]
    fn a_file_of_many_rows_is_counted_with_its_extents() {
        for (rows, blocks) in [(1, 0), (2, 0), (3, 1), (338, 1), (339, 2)] {
            let geometry = Geometry::new(GroupId(0), 4096, rows).unwrap();
            let more = committed_bytes(&geometry) - geometry.file_bytes();
            assert_eq!(more, blocks * 4096, "{rows} rows");
        }
    }

    #[test]
    fn what_a_file_gives_back_counts_for_every_limit() {
        let short = room(-50, -40, -1);
        let freed = |counted_bytes, disk_bytes| Freed {
            counted_bytes,
            disk_bytes,
        };
        assert!(short.is_short());
        assert!(short.without(&freed(50, 39)).is_short());
        assert!(short.without(&freed(49, 40)).is_short());
        assert!(!short.without(&freed(50, 40)).is_short());
    }
}
