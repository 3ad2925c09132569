//! Epochs: rows of one are invisible in every other, which is how a reset forgets all of them.

use std::io;

use super::layout::{EPOCHS_NAME, epoch_name, parse_epoch_name};
use crate::sys::fs::{Access, Direct, Directory};

/// Names another process may take before us in one [`Epochs::advance`].
const ATTEMPTS_MAX: u32 = 64;

/// The record of a namespace's epochs: an empty file per epoch, of which the largest counts. A name
/// is there or not, so a power cut cannot tear it.
#[derive(Debug)]
pub struct Epochs {
    directory: Directory,
    current: u32,
    begun: bool,
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
    pub fn open(namespace: &Directory) -> io::Result<Self> {
        let directory = namespace.create_directory(EPOCHS_NAME)?;
        namespace.sync()?;
        let mut epochs = Self {
            directory,
            current: 0,
            begun: false,
        };
        if let Some(current) = epochs.recorded()?.into_iter().max() {
            epochs.current = current;
        } else {
            epochs.advance(1)?;
            epochs.begun = true;
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

    /// Starts a new epoch, larger than every one before and at least `at_least`, and makes its
    /// record durable before it returns.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` when there is no larger number. The epoch is then unchanged, and
    /// whoever must not serve the old one has to try again.
    pub fn advance(&mut self, at_least: u32) -> io::Result<u32> {
        let recorded = self.recorded()?;
        let newest = recorded
            .iter()
            .copied()
            .max()
            .unwrap_or(0)
            .max(self.current);
        let first = newest.checked_add(1).ok_or_else(exhausted)?.max(at_least);
        let last = first.saturating_add(ATTEMPTS_MAX);
        for epoch in first..=last {
            match self
                .directory
                .create_new(&epoch_name(epoch), Access::Write, Direct::No)
            {
                Ok(file) => file.sync_all()?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            self.directory.sync()?;
            self.current = epoch;
            for old in recorded {
                // Only the largest record counts; one that stays is removed by the next advance.
                let _ = self.directory.unlink(&epoch_name(old));
            }
            return Ok(epoch);
        }
        Err(exhausted())
    }

    /// The epochs with a record.
    fn recorded(&self) -> io::Result<Vec<u32>> {
        let entries = self.directory.entries()?;
        Ok(entries
            .iter()
            .filter_map(|entry| parse_epoch_name(entry.name.to_str()?))
            .collect())
    }
}

/// The error of an epoch beyond the last.
fn exhausted() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "no larger epoch is free")
}
