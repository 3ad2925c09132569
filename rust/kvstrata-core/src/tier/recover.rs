//! Takes what earlier runs left in a namespace into the inventory.
//!
//! Row files are read by a few threads, each of which gathers entries in a batch of its own; what
//! needs all of them (which epoch counts, which of two rows of a key, the order of last accesses)
//! comes after.

use std::io;

use crate::eviction::ContainerId;
use crate::format::checksum::RowChecksum;
use crate::format::row_table::RowEntry;
use crate::format::superblock::{FileId, NamespaceDigest};
use crate::index::batch::{Batch, ChunkNumbers};
use crate::index::recovery::{FoundFile, Owner, Tabled, list};
use crate::index::{Fingerprinter, IndexEntry, RowPlace};
use crate::io::file::{DataFile, FileCache};
use crate::key::GroupId;
use crate::namespace::epoch::Epochs;
use crate::notice::Level;
use crate::sys::fs::{Access, Directory};
use crate::sys::sync::atomic::{AtomicUsize, Ordering};
use crate::sys::sync::{Arc, fan_out, processors};
use crate::tier::container::Container;
use crate::tier::inventory::Inventory;
use crate::tier::row_file::RowFile;
use crate::tier::rows::{RowUse, Rows};
use crate::tier::space::committed_bytes;
use crate::tier::surroundings::Surroundings;
use crate::tier::touched::TouchedPages;

/// Most threads that read row tables: more only wait for memory.
const WORKERS_MAX: usize = 4;

/// Where to look and what to use.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    /// The directory of each group's row files.
    pub(crate) directories: &'a [Arc<Directory>],
    /// The groups, in the same order, with the payload bytes of a row.
    pub(crate) groups: &'a [(GroupId, u64)],
    /// The namespace.
    pub(crate) digest: NamespaceDigest,
    /// For descriptors.
    pub(crate) cache: &'a Arc<FileCache>,
    /// For the index.
    pub(crate) fingerprinter: &'a Fingerprinter,
    /// For counters and log lines.
    pub(crate) around: &'a Surroundings,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovered {
    /// Bytes that the row files take.
    pub(crate) allocated_bytes: u64,
    /// Largest store order of any row.
    pub(crate) last_store_order: u64,
}

/// A file to read. Its container has the number of its place in the list.
struct Task<'a> {
    directory: &'a Arc<Directory>,
    owner: Owner,
    name: String,
    file_id: FileId,
}

/// A file that was read.
struct Taken {
    task: usize,
    found: FoundFile,
    rows: Rows,
}

/// One thread's part of the reading.
struct Reader<'a> {
    source: &'a Source<'a>,
    epoch: u32,
    batch: Batch<'a>,
    files: Vec<Taken>,
    /// Tasks whose files hold nothing that could be used.
    unusable: Vec<usize>,
    newest_epoch: u32,
    last_store_order: u64,
    buffer: Vec<u8>,
}

/// Reads all row tables and lists the rows of the current epoch, the coldest first.
///
/// # Errors
/// The error of a directory that cannot be listed, or of recording an epoch.
pub(crate) fn recover(
    source: &Source<'_>,
    epochs: &mut Epochs,
    inventory: &mut Inventory,
) -> io::Result<Recovered> {
    let tasks = find_files(source)?;
    let numbers = ChunkNumbers::default();
    let workers = processors().min(WORKERS_MAX).min(tasks.len()).max(1);
    let next = AtomicUsize::new(0);
    let mut readers = fan_out(workers, || {
        let mut reader = Reader {
            source,
            epoch: epochs.current(),
            batch: Batch::new(&numbers),
            files: Vec::new(),
            unusable: Vec::new(),
            newest_epoch: 0,
            last_store_order: 0,
            buffer: Vec::new(),
        };
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(at) else {
                reader.batch.sort();
                return reader;
            };
            reader.read(at, task);
        }
    });
    let newest = readers.iter().map(|reader| reader.newest_epoch).max();
    let newest = newest.unwrap_or(0);
    let given_up = newest > epochs.current() || (epochs.begun() && newest > 0);
    if given_up {
        // The record of a reset was lost: nothing stored under any epoch may come back.
        source.around.notices.say(Level::Warning, "epoch", || {
            "the record of the newest epoch is gone; all stored rows are given up".to_owned()
        });
        epochs.advance(newest.saturating_add(1))?;
    }
    let mut recovered = Recovered::default();
    let mut batches = Vec::with_capacity(readers.len());
    for reader in readers.drain(..) {
        let orders = recovered.last_store_order.max(reader.last_store_order);
        recovered.last_store_order = orders;
        for at in reader.unusable {
            if let Some(task) = tasks.get(at) {
                remove_unusable(source, task.directory, &task.name);
            }
        }
        for mut file in reader.files {
            if given_up {
                file.rows.give_up();
            }
            add_file(source, &tasks, file, inventory);
        }
        batches.push(reader.batch);
    }
    recovered.allocated_bytes = inventory
        .containers()
        .map(|(_, container)| container.allocated_bytes)
        .sum();
    if !given_up {
        inventory.fill(&mut batches, workers);
    }
    Ok(recovered)
}

/// Lists the row files of all groups; removes those that were being made.
fn find_files<'a>(source: &Source<'a>) -> io::Result<Vec<Task<'a>>> {
    let mut tasks = Vec::new();
    for (directory, (group, row_bytes)) in source.directories.iter().zip(source.groups) {
        let names = list(directory)?;
        source.around.metrics.junk.add(names.strange);
        for name in &names.unfinished {
            // A process was killed while it made the file: that is no fault of anybody's.
            let metrics = &source.around.metrics;
            match directory.unlink(name) {
                Ok(()) => metrics.leftovers.add(1),
                Err(_) => metrics.junk.add(1),
            }
        }
        let owner = Owner {
            namespace: source.digest,
            group: *group,
            row_bytes: *row_bytes,
        };
        tasks.extend(names.files.into_iter().map(|(name, file_id)| Task {
            directory,
            owner,
            name,
            file_id,
        }));
    }
    Ok(tasks)
}

/// Removes all row files of a group, durably.
///
/// # Errors
/// The kernel's; some may be left.
pub(crate) fn remove_row_files(directory: &Directory) -> io::Result<()> {
    for (name, _) in list(directory)?.files {
        directory.unlink(&name)?;
    }
    directory.sync()
}

/// Removes a file that bears our name but holds nothing that could be used.
fn remove_unusable(source: &Source<'_>, directory: &Directory, name: &str) {
    source.around.metrics.junk.add(1);
    let removed = directory.unlink(name);
    source.around.notices.say(Level::Warning, "junk", || {
        let path = directory.path_of(name);
        match removed {
            Ok(()) => format!("{} was unusable and is removed", path.display()),
            Err(error) => format!("{} is unusable: {error}", path.display()),
        }
    });
}

impl Reader<'_> {
    fn read(&mut self, at: usize, task: &Task<'_>) {
        match FoundFile::open(task.directory, &task.name, task.file_id, &task.owner) {
            Ok(Some(found)) => self.read_rows(at, found),
            Ok(None) => self.unusable.push(at),
            // Not readable now is no reason to destroy it.
            Err(_) => self.source.around.metrics.junk.add(1),
        }
    }

    /// Reads a file's table; its rows of the current epoch become entries.
    fn read_rows(&mut self, at: usize, found: FoundFile) {
        let geometry = found.superblock.geometry;
        let container = ContainerId(u32::try_from(at).unwrap_or(u32::MAX));
        let mut rows = Rows::new(geometry.row_count());
        let mut damaged = 0;
        let whole = found.cut_at.unwrap_or(u32::MAX);
        self.last_store_order = self
            .last_store_order
            .max(found.superblock.clean_store_order);
        let rows_max = usize::try_from(geometry.row_count()).unwrap_or(0);
        self.batch.reserve(rows_max);
        let mut buffer = core::mem::take(&mut self.buffer);
        let unread = found.read_table(&mut buffer, |row, tabled| {
            rows.set_stale(row, true);
            match tabled {
                Tabled::Row(entry) if row < whole => {
                    if let Some(used) = self.take_row(RowPlace { container, row }, &entry) {
                        rows.set(row, used);
                        rows.set_stale(row, false);
                    }
                }
                Tabled::Row(_) => {}
                Tabled::Damaged => damaged += 1,
            }
        });
        self.buffer = buffer;
        let metrics = &self.source.around.metrics;
        metrics
            .junk
            .add(damaged + u64::from(found.cut_at.is_some()));
        let mut last = whole;
        if let Some((row, error)) = unread {
            last = last.min(row);
            if error.is_some() {
                metrics.errors.add(1);
            }
        }
        for row in last..geometry.row_count() {
            rows.set(row, RowUse::Retired);
        }
        self.files.push(Taken {
            task: at,
            found,
            rows,
        });
    }

    /// Takes a valid entry; what its row is used for if it is one of the current epoch.
    fn take_row(&mut self, place: RowPlace, entry: &RowEntry) -> Option<RowUse> {
        self.newest_epoch = self.newest_epoch.max(entry.epoch);
        self.last_store_order = self.last_store_order.max(entry.store_order);
        if entry.epoch != self.epoch {
            return None;
        }
        let checksum = RowChecksum::from_field(&entry.checksum)?;
        let id = self.batch.push(IndexEntry {
            fingerprint: self.source.fingerprinter.of(&entry.key),
            place,
            checksum,
            store_order: entry.store_order,
            pins: 0,
            access_time: entry.access_time,
            access_dirty: false,
            listed: true,
        })?;
        Some(RowUse::Occupied(id))
    }
}

/// Takes one file in.
fn add_file(source: &Source<'_>, tasks: &[Task<'_>], taken: Taken, inventory: &mut Inventory) {
    let Taken { task, found, rows } = taken;
    let Some(id) = u32::try_from(task).ok().map(ContainerId) else {
        return;
    };
    let Some(task) = tasks.get(task) else {
        return;
    };
    let Some(class) = inventory.class_of(task.owner.group) else {
        return;
    };
    let file = DataFile::new(Arc::clone(task.directory), &*task.name, Access::Write);
    let cache = Arc::clone(source.cache);
    let geometry = found.superblock.geometry;
    let row_file = RowFile::new(file, cache, found.superblock, false, found.changes);
    // A file takes its whole size, and what its extents need, once its rows are written.
    let committed = if found.cut_at.is_some() {
        0
    } else {
        committed_bytes(&geometry)
    };
    let container = Container {
        row_file: Arc::new(row_file),
        class,
        rows,
        allocated_bytes: found.allocated_bytes.max(committed),
        touched: TouchedPages::default(),
        unwritable: false,
        lost: false,
        torn_after: Some(found.superblock.clean_store_order),
    };
    inventory.put_container(id, container);
}
