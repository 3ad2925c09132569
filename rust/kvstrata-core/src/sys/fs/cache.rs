//! What the page cache keeps of a file. All of it is advice: a file system that takes none keeps
//! its pages, and that is no error.

use core::num::NonZeroU64;
use std::os::fd::AsRawFd;

use rustix::fs::{Advice, fadvise};

use super::File;

impl File {
    /// Drops the clean pages of a range (bytes) from the page cache.
    pub fn forget_pages(&self, offset: u64, bytes: u64) {
        if let Some(bytes) = NonZeroU64::new(bytes) {
            let _ = fadvise(self, offset, Some(bytes), Advice::DontNeed);
        }
    }

    /// Has the kernel read nothing that it was not asked for: it would come back after it was
    /// dropped.
    pub fn read_nothing_ahead(&self) {
        let _ = fadvise(self, 0, None, Advice::Random);
    }

    /// Starts writing the dirty pages of a range (bytes) to the device.
    pub fn begin_writing_back(&self, offset: u64, bytes: u64) {
        self.sync_range(offset, bytes, libc::SYNC_FILE_RANGE_WRITE);
    }

    /// Waits until the dirty pages of a range (bytes) have been written to the device. Says nothing
    /// of the device's own cache.
    pub fn finish_writing_back(&self, offset: u64, bytes: u64) {
        let whole = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        self.sync_range(offset, bytes, whole);
    }

    fn sync_range(&self, offset: u64, bytes: u64, flags: libc::c_uint) {
        let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else {
            return;
        };
        #[expect(unsafe_code, reason = "no crate here wraps this call")]
        // SAFETY: the descriptor is open, and the call touches no memory of ours.
        let _ = unsafe { libc::sync_file_range(self.as_raw_fd(), offset, bytes, flags) };
    }
}
