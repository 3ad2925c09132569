//! Files and directories. Every open is close-on-exec and follows no symbolic link in its last
//! component, every name is one component below an open directory, and what is created has exactly
//! the mode of its [`ShareMode`], whatever the umask.

mod around;
mod cache;
mod descriptors;
mod directory;
mod file;
mod root;
mod statistics;
mod vectored;

pub use around::{around_with_file, has_file};
pub use descriptors::{Descriptors, Noted};
pub use directory::{Directory, DirectoryEntry, EntryKind, TEMPORARY_SUFFIX};
pub use file::{Access, Allocation, Direct, DirectAlignment, File, FileStat};
pub use statistics::FileSystem;
pub use vectored::{IO_VECTORS_MAX, IoVector};

use std::io;
use std::io::Read;
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;

/// Who else may use what is stored at a root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShareMode {
    /// Only this user: directories 0700, files 0600.
    #[default]
    Private,
    /// The root directory's group too: directories 2770 (set-group-id), files 0660.
    Group,
}

impl ShareMode {
    /// Mode of the directories that are created.
    pub(crate) const fn directory_mode(self) -> Mode {
        match self {
            Self::Private => Mode::RWXU,
            Self::Group => Mode::RWXU.union(Mode::RWXG).union(Mode::SGID),
        }
    }

    /// Mode of the files that are created.
    pub(crate) const fn file_mode(self) -> Mode {
        let owner = Mode::RUSR.union(Mode::WUSR);
        match self {
            Self::Private => owner,
            Self::Group => owner.union(Mode::RGRP).union(Mode::WGRP),
        }
    }

    /// The mode bits with which others could put or replace names.
    pub(crate) const fn forbidden_bits(self) -> Mode {
        match self {
            Self::Private => Mode::WGRP.union(Mode::WOTH),
            Self::Group => Mode::WOTH,
        }
    }
}

/// Whether `error` is the kernel's refusal to follow a symbolic link.
pub fn is_symbolic_link(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::LOOP)
}

/// Fills `buffer` from the operating system's random source.
///
/// # Errors
/// The kernel's, when it has no random source.
pub fn fill_random(buffer: &mut [u8]) -> io::Result<()> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::io::retry_on_intr(|| getrandom(&mut *rest, GetRandomFlags::empty()))?;
    }
    Ok(())
}

/// Reads a file of the configuration, by its path and through links: what an orchestrator mounts
/// are links. Longer than `bytes_max` is an error.
///
/// # Errors
/// The kernel's; `FileTooLarge`.
pub fn read_small(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the seam every other module goes through"
    )]
    let file = std::fs::File::open(path)?;
    let mut bytes = Vec::new();
    let read = file
        .take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > bytes_max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(bytes)
}
