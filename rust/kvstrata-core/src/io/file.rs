//! Row files and their descriptors, of which only so many are open at once.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::sys::fs::{Access, Direct, Directory, File};
use crate::sys::sync::atomic::{AtomicU64, Ordering};
use crate::sys::sync::{Arc, Mutex, MutexGuard, Weak, lock, try_lock};

/// Smallest and largest bound of a [`FileCache`]. With the descriptors that threads hold while they
/// work the smallest leaves room for the host's own under `ulimit -n 64`.
const DESCRIPTORS_MIN: usize = 24;
const DESCRIPTORS_MAX: usize = 512;

/// The bound of a [`FileCache`] that suits the process: a sixteenth of the descriptors it may have.
pub fn descriptors_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let part = usize::try_from(limit / 16).unwrap_or(DESCRIPTORS_MAX);
    part.clamp(DESCRIPTORS_MIN, DESCRIPTORS_MAX)
}

/// A file of rows, by name. Its descriptors are opened when first needed, on an engine's thread,
/// and closed when others need them more, or with the last handle.
#[derive(Debug)]
pub struct DataFile {
    directory: Arc<Directory>,
    name: String,
    access: Access,
    direct: Slot,
    buffered: Slot,
}

#[derive(Debug, Default)]
struct Slot {
    file: Mutex<Option<Arc<File>>>,
    last_use: AtomicU64,
}

impl DataFile {
    /// The file `name` in `directory`; nothing is opened yet.
    pub fn new(directory: Arc<Directory>, name: impl Into<String>, access: Access) -> Arc<Self> {
        Arc::new(Self {
            directory,
            name: name.into(),
            access,
            direct: Slot::default(),
            buffered: Slot::default(),
        })
    }

    /// The file's name in its directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory that holds it.
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// Closes what is open; operations under way keep theirs until they end.
    pub fn close(&self) {
        for slot in [&self.direct, &self.buffered] {
            drop(lock(&slot.file).take());
        }
    }

    const fn slot(&self, direct: Direct) -> &Slot {
        match direct {
            Direct::Yes => &self.direct,
            Direct::No => &self.buffered,
        }
    }
}

/// Opens descriptors and bounds their number.
#[derive(Debug)]
pub struct FileCache {
    open: Mutex<Vec<(Weak<DataFile>, Direct)>>,
    descriptors_max: usize,
    uses: AtomicU64,
}

impl FileCache {
    /// A cache that keeps at most `descriptors_max` descriptors open, besides those in use.
    pub const fn new(descriptors_max: usize) -> Self {
        Self {
            open: Mutex::new(Vec::new()),
            descriptors_max,
            uses: AtomicU64::new(0),
        }
    }

    /// The open descriptor of `file`, opened now if need be, and the length of the file in bytes.
    ///
    /// # Errors
    /// `ENOENT` when the file has lost its name; as [`Directory::open`].
    pub fn get(&self, file: &Arc<DataFile>, direct: Direct) -> io::Result<(Arc<File>, u64)> {
        let slot = file.slot(direct);
        self.note_use(slot);
        let mut held = lock(&slot.file);
        let (opened, is_new) = if let Some(open) = &*held {
            (Arc::clone(open), false)
        } else {
            let opened = self.open_file(file, direct)?;
            (Arc::clone(held.insert(Arc::new(opened))), true)
        };
        let size_bytes = size_of_named(&opened, &mut held)?;
        drop(held);
        if is_new {
            self.register(file, direct);
        }
        Ok((opened, size_bytes))
    }

    fn note_use(&self, slot: &Slot) {
        let now = self.uses.fetch_add(1, Ordering::Relaxed);
        slot.last_use.store(now, Ordering::Relaxed);
    }

    /// Opens the file; when the process has run out of descriptors, gives up half of the cache and
    /// tries once more.
    fn open_file(&self, file: &DataFile, direct: Direct) -> io::Result<File> {
        let open = || match file.directory.open(&file.name, file.access, direct) {
            // What must not be written may still be read; a write then ends as `EBADF`.
            Err(error) if is_write_protected(&error) => {
                file.directory.open(&file.name, Access::Read, direct)
            }
            opened => opened,
        };
        let opened = open();
        let errno = opened.as_ref().err().and_then(io::Error::raw_os_error);
        let exhausted = [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error()));
        if !exhausted.contains(&errno) {
            return opened;
        }
        let mut known = lock(&self.open);
        let keep = known.len() / 2;
        let closed = Self::take_down_to(&mut known, keep);
        drop(known);
        drop(closed);
        open()
    }

    fn register(&self, file: &Arc<DataFile>, direct: Direct) {
        let mut open = lock(&self.open);
        let known = |(other, kind): &(Weak<DataFile>, Direct)| {
            *kind == direct && core::ptr::eq(other.as_ptr(), Arc::as_ptr(file))
        };
        if !open.iter().any(known) {
            open.push((Arc::downgrade(file), direct));
        }
        let mut closed = Vec::new();
        if open.len() > self.descriptors_max {
            // A few at a time, so that not every opening sorts.
            let keep = self.descriptors_max - self.descriptors_max / 8;
            closed = Self::take_down_to(&mut open, keep);
        }
        // Closing may take as long as the mount likes: not under the lock.
        drop(open);
        drop(closed);
    }

    /// Forgets files that are gone, then takes the least recently used, to be closed. A descriptor
    /// whose slot is locked is being opened or looked at: it is not the one to close.
    fn take_down_to(
        open: &mut MutexGuard<'_, Vec<(Weak<DataFile>, Direct)>>,
        keep: usize,
    ) -> Vec<Arc<File>> {
        open.retain(|(file, _)| file.strong_count() > 0);
        // Each key is read once: other threads use files meanwhile, and an order that changes while
        // it is sorted by ends in a panic.
        open.sort_by_cached_key(|(file, direct)| {
            let file = file.upgrade();
            file.map_or(0, |file| {
                file.slot(*direct).last_use.load(Ordering::Relaxed)
            })
        });
        let mut excess = open.len().saturating_sub(keep);
        let mut taken = Vec::new();
        open.retain(|(file, direct)| {
            let Some(file) = file.upgrade().filter(|_| excess > 0) else {
                return excess == 0;
            };
            let Some(mut held) = try_lock(&file.slot(*direct).file) else {
                return true;
            };
            taken.extend(held.take());
            excess -= 1;
            false
        });
        taken
    }
}

/// The length of a file that still has a name, in bytes. One without is forgotten.
fn size_of_named(opened: &File, held: &mut Option<Arc<File>>) -> io::Result<u64> {
    match opened.size_if_named() {
        Ok(Some(size_bytes)) => Ok(size_bytes),
        Ok(None) => {
            *held = None;
            Err(Errno::NOENT.into())
        }
        Err(error) => {
            *held = None;
            Err(error)
        }
    }
}

/// Whether an error says that a file may be read but not written.
fn is_write_protected(error: &io::Error) -> bool {
    [Errno::ROFS, Errno::PERM, Errno::ACCESS]
        .map(|errno| Some(errno.raw_os_error()))
        .contains(&error.raw_os_error())
}
