//! Zeroed memory at an address that direct I/O accepts.

use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use crate::error::{Error, ErrorKind, Result};

/// Alignment that every Linux file system's direct I/O accepts, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Owned bytes at an aligned address. Freed when dropped, so whoever hands its address to the
/// kernel keeps it (in an `Arc`) until the kernel is done.
pub struct AlignedBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

#[expect(
    unsafe_code,
    reason = "the buffer owns its allocation as a `Vec` would"
)]
// SAFETY: the allocation belongs to the buffer alone; `&self` gives out only shared bytes. Writes
// through `base()` follow the rule of the module `buffer`.
unsafe impl Send for AlignedBuffer {}

#[expect(
    unsafe_code,
    reason = "the buffer owns its allocation as a `Vec` would"
)]
// SAFETY: as above.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// `length` zero bytes at a multiple of `alignment` (a power of two), both in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an alignment that is no power of two, no bytes, or more than
    /// there are addresses; [`ErrorKind::Unavailable`] when there is no memory.
    pub fn zeroed(length: usize, alignment: usize) -> Result<Self> {
        let layout = Layout::from_size_align(length, alignment)
            .ok()
            .filter(|layout| layout.size() > 0)
            .ok_or_else(|| {
                Error::argument(format!(
                    "a buffer of {length} bytes aligned to {alignment} cannot be"
                ))
            })?;
        #[expect(unsafe_code, reason = "the one allocation")]
        // SAFETY: the layout's size is at least 1.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                format!("no memory for a buffer of {length} bytes"),
            )
        })?;
        Ok(Self { base, layout })
    }

    /// Address of the first byte, for the kernel. See the module `buffer` for who may write there.
    pub const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        #[expect(unsafe_code, reason = "the allocation seen as bytes")]
        // SAFETY: `base` is valid for the layout's size, all of it initialised (zeroed), and
        // nobody writes there while it is read: the rule of the module `buffer`.
        unsafe {
            core::slice::from_raw_parts(self.base.as_ptr(), self.layout.size())
        }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        #[expect(unsafe_code, reason = "the allocation seen as bytes")]
        // SAFETY: as `deref`, and `&mut self` makes the access exclusive.
        unsafe {
            core::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size())
        }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "the counterpart of `zeroed`")]
        // SAFETY: allocated by `zeroed` with this layout, freed once.
        unsafe {
            dealloc(self.base.as_ptr(), self.layout);
        }
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "AlignedBuffer({:p}+{})",
            self.base,
            self.layout.size()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_zero_aligned_and_writable() {
        for alignment in [512, PAGE_BYTES, 1 << 16] {
            let mut buffer = AlignedBuffer::zeroed(3 * alignment + 5, alignment).unwrap();
            assert_eq!(buffer.base().addr() % alignment, 0);
            assert_eq!(buffer.len(), 3 * alignment + 5);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn an_alignment_that_is_no_power_of_two_or_a_length_beyond_memory_is_refused() {
        assert!(AlignedBuffer::zeroed(10, 3).is_err());
        assert!(AlignedBuffer::zeroed(10, 0).is_err());
        assert!(AlignedBuffer::zeroed(0, 4096).is_err());
        assert!(AlignedBuffer::zeroed(usize::MAX, 4096).is_err());
        assert!(AlignedBuffer::zeroed(1 << 62, 4096).is_err());
    }
}
