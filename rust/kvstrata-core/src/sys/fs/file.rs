//! An open regular file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, OFlags, Stat, StatxFlags, fallocate,
    fcntl_setfl, fdatasync, flock, fstat, fsync, ftruncate, statx,
};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

use super::descriptors::{Descriptors, Noted};
use super::statistics::file_system;
use crate::sys::sync::Arc;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing.
    Write,
}

/// Whether reads and writes go round the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direct {
    /// `O_DIRECT`; offsets, lengths and memory must be aligned. A file system without it answers
    /// `EINVAL` at open or at the first transfer.
    Yes,
    /// Through the page cache.
    No,
}

/// How a file's bytes were reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// The file system holds the space: a later write cannot run out of it.
    Reserved,
    /// The file system cannot reserve; the file is sparse and a later write may find no space.
    Sparse,
}

/// Alignment that direct I/O on a file needs, as the kernel states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlignment {
    /// Of memory addresses, in bytes.
    pub memory_bytes: u32,
    /// Of file offsets and lengths, in bytes.
    pub offset_bytes: u32,
}

/// What the file system says of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Length in bytes.
    pub size_bytes: u64,
    /// Bytes allocated on the device.
    pub allocated_bytes: u64,
    /// Names of the file; 0 when it was unlinked.
    pub links: u64,
    /// Permission bits, with set-id and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Last modification of the bytes, seconds since 1970 UTC.
    pub modified_unix_seconds: i64,
    /// Whether it is a regular file.
    pub is_regular: bool,
}

impl FileStat {
    /// What the kernel said.
    pub(super) fn of(stat: &Stat) -> Self {
        Self {
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            allocated_bytes: u64::try_from(stat.st_blocks)
                .unwrap_or(0)
                .saturating_mul(512),
            links: stat.st_nlink,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            modified_unix_seconds: stat.st_mtime,
            is_regular: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        }
    }
}

/// Flags of every open: no link is followed, nothing blocks (a FIFO), no terminal is taken.
pub(super) const OPEN_FLAGS: OFlags = OFlags::CLOEXEC
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// The flags of `access` and `direct`.
pub(super) const fn flags(access: Access, direct: Direct) -> OFlags {
    let access = match access {
        Access::Read => OFlags::RDONLY,
        Access::Write => OFlags::RDWR,
    };
    access.union(status_flags(direct))
}

/// The flags of `direct` that an open file keeps.
const fn status_flags(direct: Direct) -> OFlags {
    match direct {
        Direct::Yes => OFlags::DIRECT,
        Direct::No => OFlags::empty(),
    }
}

/// An open regular file; closed when dropped.
#[derive(Debug)]
pub struct File {
    // Dropped before the descriptor is closed.
    noted: Option<Noted>,
    fd: OwnedFd,
}

impl File {
    /// Takes a descriptor opened with [`OPEN_FLAGS`].
    ///
    /// # Errors
    /// `InvalidData` when it is not a regular file.
    pub(super) fn from_opened(fd: OwnedFd, direct: Direct) -> io::Result<Self> {
        let file = Self { noted: None, fd };
        if !file.stat()?.is_regular {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a regular file",
            ));
        }
        fcntl_setfl(&file.fd, status_flags(direct))?;
        Ok(file)
    }

    /// Writes its descriptor down among others.
    pub(super) fn noted_in(mut self, descriptors: Option<&Arc<Descriptors>>) -> Self {
        self.noted = descriptors.and_then(|descriptors| descriptors.note(&self.fd));
        self
    }

    /// Reads once at `offset` (bytes); the bytes read may be fewer than the buffer, 0 at the end of
    /// the file. Interrupted reads are tried again.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(retry_on_intr(|| pread(&self.fd, &mut *buffer, offset))?)
    }

    /// Fills `buffer` from `offset` (bytes).
    ///
    /// # Errors
    /// `UnexpectedEof` when the file ends before the buffer is full; the kernel's.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.read_at(rest, advanced(offset, done)?)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` at `offset` (bytes).
    ///
    /// # Errors
    /// `WriteZero` when the kernel takes nothing; the kernel's. Part may have been written.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let offset = advanced(offset, done)?;
            match retry_on_intr(|| pwrite(&self.fd, rest, offset))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// Makes the file `bytes` long, its space reserved where the file system can. New bytes read
    /// as zeros.
    ///
    /// # Errors
    /// `StorageFull` when the space is not there, also where it cannot be reserved; the kernel's.
    pub fn allocate(&self, bytes: u64) -> io::Result<Allocation> {
        match retry_on_intr(|| fallocate(&self.fd, FallocateFlags::empty(), 0, bytes)) {
            Ok(()) => Ok(Allocation::Reserved),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.allocate_sparse(bytes),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The way of [`File::allocate`] where space cannot be reserved.
    fn allocate_sparse(&self, bytes: u64) -> io::Result<Allocation> {
        let missing = bytes.saturating_sub(self.stat()?.allocated_bytes);
        if file_system(&self.fd)?.available_bytes < missing {
            return Err(Errno::NOSPC.into());
        }
        self.set_length(bytes)?;
        Ok(Allocation::Sparse)
    }

    /// Cuts or lengthens the file to `bytes`; new bytes read as zeros and are not allocated.
    pub fn set_length(&self, bytes: u64) -> io::Result<()> {
        Ok(retry_on_intr(|| ftruncate(&self.fd, bytes))?)
    }

    /// Asks for size, mode, owner and links.
    pub fn stat(&self) -> io::Result<FileStat> {
        Ok(FileStat::of(&fstat(&self.fd)?))
    }

    /// The length in bytes; None when the file was unlinked. Asks for nothing else: a remote file
    /// system can answer this from what it knows, where times would have to be fetched.
    pub fn size_if_named(&self) -> io::Result<Option<u64>> {
        let wanted = StatxFlags::SIZE | StatxFlags::NLINK;
        let (size_bytes, links) = match statx(&self.fd, c"", AtFlags::EMPTY_PATH, wanted) {
            Ok(stat) => (stat.stx_size, u64::from(stat.stx_nlink)),
            // Sandboxes that were made before the call was.
            Err(Errno::NOSYS | Errno::PERM) => {
                let stat = self.stat()?;
                (stat.size_bytes, stat.links)
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok((links > 0).then_some(size_bytes))
    }

    /// Makes the bytes, and the length they need, durable.
    pub fn sync_data(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fdatasync(&self.fd))?)
    }

    /// Makes the bytes and all metadata durable.
    pub fn sync_all(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fsync(&self.fd))?)
    }

    /// Takes the exclusive lock of this open file, without waiting: `false` when another open file
    /// holds it. Held until the file (and every duplicate of its descriptor) is closed.
    pub fn try_lock_exclusive(&self) -> io::Result<bool> {
        match retry_on_intr(|| flock(&self.fd, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Another descriptor of the same open file, which shares its lock.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Gives the exclusive lock back, also where a forked child still has a copy of the descriptor.
    pub fn unlock(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| flock(&self.fd, FlockOperation::Unlock))?)
    }

    /// The alignment of direct I/O, where the kernel (6.1 on) and file system state one.
    pub fn direct_alignment(&self) -> Option<DirectAlignment> {
        let stat = statx(&self.fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let stated = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN);
        (stated && stat.stx_dio_mem_align != 0 && stat.stx_dio_offset_align != 0).then_some(
            DirectAlignment {
                memory_bytes: stat.stx_dio_mem_align,
                offset_bytes: stat.stx_dio_offset_align,
            },
        )
    }
}

/// `offset` plus the `done` bytes already moved.
fn advanced(offset: u64, done: usize) -> io::Result<u64> {
    u64::try_from(done)
        .ok()
        .and_then(|done| offset.checked_add(done))
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
