//! An open directory and the names in it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, chmod, fchmod, fstat, fsync, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use super::descriptors::{Descriptors, Noted};
use super::file::{Access, Direct, File, FileStat, OPEN_FLAGS, flags};
use super::statistics::{FileSystem, file_system};
use super::{ShareMode, root};
use crate::error::Result;
use crate::sys::sync::Arc;

/// End of the names of files that [`Directory::publish`] has not finished. One that is found when
/// nobody is publishing is rubbish.
pub const TEMPORARY_SUFFIX: &str = ".tmp";

/// Longest name of a component, in bytes (Linux's `NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;

/// Kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, a device, a socket, a FIFO.
    Other,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The name, as the file system holds it (it may be no UTF-8).
    pub name: OsString,
    /// What it names; a link is not followed.
    pub kind: EntryKind,
}

/// An open directory; closed when dropped. Names are relative to the open directory, so renaming or
/// replacing one of its parents changes nothing for its holder.
#[derive(Debug)]
pub struct Directory {
    // Dropped before the descriptor is closed.
    noted: Option<Noted>,
    descriptors: Option<Arc<Descriptors>>,
    fd: OwnedFd,
    path: PathBuf,
    share: ShareMode,
}

/// `name`, when it is a single component.
fn component(name: &str) -> io::Result<&str> {
    let single = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
    if single && name.len() <= NAME_BYTES_MAX {
        return Ok(name);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "a file name is not a single component",
    ))
}

impl Directory {
    /// Opens the directory at `path`, a root; with `create`, makes it and its missing parents (mode
    /// 0700, or the mode of `share`).
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`], naming path, cause and remedy, when it cannot be
    /// created or opened or written, is no directory or a symbolic link, belongs to someone else,
    /// or is writable by others than `share` says.
    pub fn open_root(path: &Path, create: bool, share: ShareMode) -> Result<Self> {
        root::open(path, create, share)
    }

    /// Wraps an open directory.
    pub(super) const fn from_parts(fd: OwnedFd, path: PathBuf, share: ShareMode) -> Self {
        Self {
            noted: None,
            descriptors: None,
            fd,
            path,
            share,
        }
    }

    /// Writes its descriptor down among others, and those of all that is opened through it.
    #[must_use]
    pub fn noted_in(mut self, descriptors: &Arc<Descriptors>) -> Self {
        self.noted = descriptors.note(&self.fd);
        self.descriptors = Some(Arc::clone(descriptors));
        self
    }

    /// The path the directory was opened by; for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of `name` in the directory; for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens the directory `name`.
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory` for anything else of that name, links included;
    /// `PermissionDenied` when (in private mode) it belongs to someone else, or others than the
    /// share mode says may write to it; the kernel's.
    pub fn directory(&self, name: &str) -> io::Result<Self> {
        let fd = open_directory(&self.fd, component(name)?)?;
        let directory = Self::from_parts(fd, self.path_of(name), self.share);
        let stat = fstat(&directory.fd)?;
        let refused = |text: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        if self.share == ShareMode::Private && stat.st_uid != geteuid().as_raw() {
            return refused(format!("it belongs to uid {}", stat.st_uid));
        }
        let mode = Mode::from_raw_mode(stat.st_mode);
        if mode.intersects(self.share.forbidden_bits()) {
            let mode = mode.as_raw_mode() & 0o7777;
            return refused(format!("it is writable by others (mode {mode:04o})"));
        }
        Ok(match &self.descriptors {
            Some(descriptors) => directory.noted_in(descriptors),
            None => directory,
        })
    }

    /// Makes the directory `name` unless it is there, and opens it. One that is there keeps its
    /// mode.
    ///
    /// # Errors
    /// As [`Directory::directory`]; the kernel's.
    pub fn create_directory(&self, name: &str) -> io::Result<Self> {
        create_directory(&self.fd, component(name)?, self.share.directory_mode())?;
        self.directory(name)
    }

    /// The names in the directory, in no order, without `.` and `..`.
    pub fn entries(&self) -> io::Result<Vec<DirectoryEntry>> {
        let mut entries = Vec::new();
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(errno) => return Err(errno.into()),
                },
                kind => kind,
            };
            let name = OsStr::from_bytes(name.to_bytes()).to_owned();
            entries.push(DirectoryEntry {
                name,
                kind: kind_of(kind),
            });
        }
        Ok(entries)
    }

    /// Opens the regular file `name`.
    ///
    /// # Errors
    /// `NotFound`; [`super::is_symbolic_link`]; `InvalidData` or `ENXIO` for what is no
    /// regular file; `EINVAL` for [`Direct::Yes`] where it is not supported; the kernel's.
    pub fn open(&self, name: &str, access: Access, direct: Direct) -> io::Result<File> {
        let name = component(name)?;
        let flags = flags(access, direct) | OPEN_FLAGS;
        let fd = retry_on_intr(|| openat(&self.fd, name, flags, Mode::empty()))?;
        Ok(File::from_opened(fd, direct)?.noted_in(self.descriptors.as_ref()))
    }

    /// Creates the file `name`.
    ///
    /// # Errors
    /// `AlreadyExists` when anything has that name; as [`Directory::open`].
    pub fn create_new(&self, name: &str, access: Access, direct: Direct) -> io::Result<File> {
        let name = component(name)?;
        let flags = flags(access, direct) | OPEN_FLAGS | OFlags::CREATE | OFlags::EXCL;
        let mode = self.share.file_mode();
        let fd = retry_on_intr(|| openat(&self.fd, name, flags, mode))?;
        fchmod(&fd, mode)?;
        Ok(File::from_opened(fd, direct)?.noted_in(self.descriptors.as_ref()))
    }

    /// Asks for size, space and kind of what `name` names, without opening it; a link is not
    /// followed.
    pub fn stat(&self, name: &str) -> io::Result<FileStat> {
        let name = component(name)?;
        Ok(FileStat::of(&statat(
            &self.fd,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?))
    }

    /// Removes the name of a file (or link).
    pub fn unlink(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.fd, component(name)?, AtFlags::empty())?)
    }

    /// Removes the empty directory `name`.
    pub fn remove_directory(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.fd, component(name)?, AtFlags::REMOVEDIR)?)
    }

    /// Gives `from` the name `to`, replacing what had it.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(
            &self.fd,
            component(from)?,
            &self.fd,
            component(to)?,
        )?)
    }

    /// Makes the names in the directory durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fsync(&self.fd))?)
    }

    /// Writes the file `name` so that a reader, now or after a power cut, finds the old bytes or
    /// all of the new ones: a temporary name, the bytes, fdatasync, rename, fsync of the directory.
    ///
    /// # Errors
    /// The kernel's; the old file is then still there.
    pub fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let unique = u64::from_le_bytes(random);
        let temporary = format!("{}.{unique:016x}{TEMPORARY_SUFFIX}", component(name)?);
        let file = self.create_new(&temporary, Access::Write, Direct::No)?;
        let published = file
            .write_all_at(bytes, 0)
            .and_then(|()| file.sync_data())
            .and_then(|()| self.rename(&temporary, name));
        if let Err(error) = published {
            // The first error is the one to report; a name left behind is removed at the next open.
            let _ = self.unlink(&temporary);
            return Err(error);
        }
        self.sync()
    }

    /// The bytes of the file `name`.
    ///
    /// # Errors
    /// `FileTooLarge` when it has more than `bytes_max` bytes; as [`Directory::open`].
    pub fn read_file(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        let file = self.open(name, Access::Read, Direct::No)?;
        let mut bytes = vec![0; bytes_max.saturating_add(1)];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, u64::try_from(done).unwrap_or(u64::MAX))? {
                0 => break,
                count => done += count,
            }
        }
        if done > bytes_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    /// Kind and room of the file system.
    pub fn statistics(&self) -> io::Result<FileSystem> {
        file_system(&self.fd)
    }

    /// Bytes the directory itself (not what it names) has allocated.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(&self.fd)?.st_blocks)
            .unwrap_or(0)
            .saturating_mul(512))
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Our name of a kind.
const fn kind_of(kind: FileType) -> EntryKind {
    match kind {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Directory,
        _ => EntryKind::Other,
    }
}

/// Opens the directory at `path` below `parent`; a link in the last component is not followed.
pub(super) fn open_directory(
    parent: impl AsFd,
    path: impl rustix::path::Arg + Copy,
) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| openat(&parent, path, flags, Mode::empty()))
}

/// Makes a directory with exactly `mode`; `false` when the name is taken.
pub(super) fn create_directory(
    parent: impl AsFd,
    path: impl rustix::path::Arg + Copy,
    mode: Mode,
) -> rustix::io::Result<bool> {
    match mkdirat(&parent, path, mode) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(false),
        Err(errno) => return Err(errno),
    }
    match open_directory(&parent, path) {
        Ok(fd) => fchmod(fd, mode)?,
        // A umask that takes the owner's own bits away leaves a directory its owner cannot open.
        Err(Errno::ACCESS) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = openat(&parent, path, flags, Mode::empty())?;
            let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
            chmod(format!("/proc/self/fd/{number}").as_str(), mode)?;
        }
        Err(errno) => return Err(errno),
    }
    Ok(true)
}
