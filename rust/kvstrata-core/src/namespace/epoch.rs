//! Epochs: rows of one are invisible in every other, which is how a reset forgets all of them.

use std::io;

use super::layout::{EPOCHS_NAME, epoch_name, parse_epoch_name};
use crate::format::row_table::EPOCH_LAST;
use crate::sys::fs::{Access, Direct, Directory, EntryKind};
use crate::sys::sync::Arc;

/// A namespace with fewer numbers than this left is begun anew when it is opened.
const EPOCHS_LEFT_MIN: u32 = 1 << 20;

/// Names another process may take before us in one [`Epochs::advance`].
const ATTEMPTS_MAX: u32 = 64;

/// The record of a namespace's epochs: an empty file per epoch, of which the largest counts. A name
/// is there or not, so a power cut cannot tear it.
#[derive(Debug)]
pub struct Epochs {
    namespace: Arc<Directory>,
    current: u32,
    begun: bool,
    strange: u64,
}

/// What a directory of records holds.
#[derive(Debug, Default)]
struct Records {
    epochs: Vec<u32>,
    /// Names that have the form of a record and cannot be one.
    strange: u64,
}

impl Records {
    fn read(directory: &Directory) -> io::Result<Self> {
        let mut records = Self::default();
        for entry in directory.entries()? {
            match entry.name.to_str().and_then(parse_epoch_name) {
                Some(epoch) if epoch <= EPOCH_LAST && entry.kind == EntryKind::File => {
                    records.epochs.push(epoch);
                }
                Some(_) => records.strange += 1,
                None => {}
            }
        }
        Ok(records)
    }

    fn newest(&self) -> Option<u32> {
        self.epochs.iter().copied().max()
    }
}

impl Epochs {
    /// Opens the record of `namespace`'s epochs; the first epoch, 1, is created when there is none.
    ///
    /// Whoever then finds a row of a larger epoch than [`Epochs::current`], or any row at all where
    /// the record was [`Epochs::begun`], has found that the record was lost: it must
    /// [`Epochs::advance`] to one above the largest it found, or rows that a reset forgot could come
    /// back.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(namespace: &Arc<Directory>) -> io::Result<Self> {
        let directory = namespace.create_directory(EPOCHS_NAME)?;
        namespace.sync()?;
        let records = Records::read(&directory)?;
        let newest = records.newest();
        let mut epochs = Self {
            namespace: Arc::clone(namespace),
            current: newest.unwrap_or(0),
            begun: newest.is_none(),
            strange: records.strange,
        };
        if epochs.begun {
            epochs.advance(1)?;
        }
        Ok(epochs)
    }

    /// The epoch of this process: the newest at open, or the one of its own last advance.
    pub const fn current(&self) -> u32 {
        self.current
    }

    /// Whether there was no record at open: a new namespace has none, and no rows.
    pub const fn begun(&self) -> bool {
        self.begun
    }

    /// Names found at open that look like records and are none: beyond [`EPOCH_LAST`], or no
    /// regular files. They are left alone.
    pub const fn strange(&self) -> u64 {
        self.strange
    }

    /// Whether the numbers are about to run out: [`Epochs::begin_anew`] is due.
    pub const fn used_up(&self) -> bool {
        self.current > EPOCH_LAST - EPOCHS_LEFT_MIN
    }

    /// Starts again at epoch 1. No row of any epoch may be left in the namespace, durably.
    ///
    /// # Errors
    /// The kernel's. Until all older records are gone the largest of them counts, as before.
    pub fn begin_anew(&mut self) -> io::Result<()> {
        let directory = self.directory()?;
        let records = Records::read(&directory)?;
        create(&directory, 1)?;
        directory.sync()?;
        for old in records.epochs.into_iter().filter(|epoch| *epoch != 1) {
            directory.unlink(&epoch_name(old))?;
        }
        directory.sync()?;
        self.current = 1;
        Ok(())
    }

    /// Starts a new epoch, larger than every one before and at least `at_least`, and makes its
    /// record durable before it returns. A directory of records that was removed is made again.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` when there is no larger number. The epoch is then unchanged, and
    /// whoever must not serve the old one has to try again.
    pub fn advance(&mut self, at_least: u32) -> io::Result<u32> {
        let directory = self.directory()?;
        let recorded = Records::read(&directory)?;
        let newest = recorded.newest().unwrap_or(0).max(self.current);
        let first = newest.saturating_add(1).max(at_least);
        let last = first.saturating_add(ATTEMPTS_MAX).min(EPOCH_LAST);
        for epoch in first..=last {
            if !create(&directory, epoch)? {
                continue;
            }
            directory.sync()?;
            self.current = epoch;
            for old in recorded.epochs {
                // Only the largest record counts; one that stays is removed by the next advance.
                let _ = directory.unlink(&epoch_name(old));
            }
            return Ok(epoch);
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "no larger epoch is free",
        ))
    }

    /// The directory of records, by its name: one that was held open could have lost it, and a
    /// record in it would count for nobody.
    fn directory(&self) -> io::Result<Directory> {
        let directory = self.namespace.create_directory(EPOCHS_NAME)?;
        self.namespace.sync()?;
        Ok(directory)
    }
}

/// Creates the record of an epoch, durably; `false` when the name is taken.
fn create(directory: &Directory, epoch: u32) -> io::Result<bool> {
    match directory.create_new(&epoch_name(epoch), Access::Write, Direct::No) {
        Ok(file) => file.sync_all().map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}
