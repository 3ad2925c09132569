//! Files and directories. Every open is close-on-exec and follows no symbolic link in its last
//! component, every name is one component below an open directory, and what is created has exactly
//! the mode of its [`ShareMode`], whatever the umask.

mod directory;
mod file;
mod root;
mod statistics;
mod vectored;

pub use directory::{Directory, DirectoryEntry, EntryKind, TEMPORARY_SUFFIX};
pub use file::{Access, Allocation, Direct, DirectAlignment, File, FileStat};
pub use statistics::FileSystem;
pub use vectored::{IO_VECTORS_MAX, IoVector};

use std::io;

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
