//! Positioned reads and writes over raw memory: the one place where the kernel is handed pointers.

use core::ffi::c_int;
use core::fmt;
use std::io;
use std::os::fd::AsRawFd;

use super::File;

/// Most vectors of one call (Linux's `IOV_MAX`); a longer list is refused by the kernel.
pub const IO_VECTORS_MAX: usize = 1024;

/// A piece of raw memory that a vectored read fills or a vectored write takes from.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVector(libc::iovec);

impl IoVector {
    /// `length` bytes at `base`.
    pub const fn new(base: *mut u8, length: usize) -> Self {
        Self(libc::iovec {
            iov_base: base.cast(),
            iov_len: length,
        })
    }

    /// Address of the first byte.
    pub const fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Number of bytes.
    pub const fn length(&self) -> usize {
        self.0.iov_len
    }
}

impl fmt::Debug for IoVector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:p}+{}", self.base(), self.length())
    }
}

/// The count and offset as the system call takes them.
fn arguments(vectors: &[IoVector], offset: u64) -> io::Result<(c_int, libc::off64_t)> {
    let count = c_int::try_from(vectors.len());
    match (count, libc::off64_t::try_from(offset)) {
        (Ok(count), Ok(offset)) => Ok((count, offset)),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The bytes moved, or the errno of a call that returned `result`.
fn transferred(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl File {
    /// Reads once from `offset` (bytes) into `vectors` in order; the bytes read may be fewer than
    /// asked for, 0 at the end of the file. Not retried: `Interrupted` is the caller's to handle.
    ///
    /// # Safety
    /// Every vector's memory must be valid for writes of its length until the call returns, and no
    /// reference to it may be alive.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for an offset beyond `i64`.
    #[expect(
        unsafe_code,
        reason = "rows are read straight into memory the caller lends"
    )]
    pub unsafe fn read_vectored_at(&self, vectors: &[IoVector], offset: u64) -> io::Result<usize> {
        let (count, offset) = arguments(vectors, offset)?;
        // SAFETY: `IoVector` is a transparent `iovec`, `count` is the slice's length, and the
        // caller upholds that every vector is valid for writes and unshared.
        transferred(unsafe {
            libc::preadv64(self.as_raw_fd(), vectors.as_ptr().cast(), count, offset)
        })
    }

    /// Writes once at `offset` (bytes) from `vectors` in order; the bytes written may be fewer than
    /// asked for. Not retried: `Interrupted` is the caller's to handle.
    ///
    /// # Safety
    /// Every vector's memory must be valid for reads of its length until the call returns, and no
    /// mutable reference to it may be alive.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for an offset beyond `i64`.
    #[expect(
        unsafe_code,
        reason = "rows are written straight from memory the caller lends"
    )]
    pub unsafe fn write_vectored_at(&self, vectors: &[IoVector], offset: u64) -> io::Result<usize> {
        let (count, offset) = arguments(vectors, offset)?;
        // SAFETY: `IoVector` is a transparent `iovec`, `count` is the slice's length, and the
        // caller upholds that every vector is valid for reads.
        transferred(unsafe {
            libc::pwritev64(self.as_raw_fd(), vectors.as_ptr().cast(), count, offset)
        })
    }
}
