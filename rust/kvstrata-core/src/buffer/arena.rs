//! The caller's memory, in which rows have their slots.

use core::fmt;
use core::ptr::NonNull;

/// Memory that someone else owns. Offsets and lengths are bytes.
///
/// Invariant, upheld by whoever called [`Arena::new`]: a slot that a job names is left alone from
/// the job's start until its result is polled, and longer while the tier calls it busy.
pub struct Arena {
    base: NonNull<u8>,
    length: usize,
}

#[expect(
    unsafe_code,
    reason = "the memory is shared with its owner by contract"
)]
// SAFETY: an arena is an address and a length; `Arena::new`'s contract covers every access.
unsafe impl Send for Arena {}

#[expect(
    unsafe_code,
    reason = "the memory is shared with its owner by contract"
)]
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Wraps `length` bytes at `base`; None for a null address or a length beyond `isize::MAX`.
    ///
    /// # Safety
    /// The bytes are valid for reads and writes, initialised, and stay so until the arena and all
    /// that was made from it are gone (the tier is closed and every operation has completed). The
    /// bytes of a slot are left alone while an operation owns it.
    #[expect(unsafe_code, reason = "the caller vouches for memory that is not ours")]
    pub unsafe fn new(base: *mut u8, length: usize) -> Option<Self> {
        isize::try_from(length).ok()?;
        NonNull::new(base).map(|base| Self { base, length })
    }

    /// Number of bytes.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Address of the first byte as a number, for alignment.
    pub fn base_address(&self) -> usize {
        self.base.addr().get()
    }

    /// Address of the first byte, for the kernel.
    pub const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Whether `length` bytes from `offset` lie within the arena.
    pub const fn contains(&self, offset: usize, length: usize) -> bool {
        match offset.checked_add(length) {
            Some(end) => end <= self.length,
            None => false,
        }
    }

    /// The bytes of a slot, when it lies within the arena. Only for a slot that a job of the
    /// caller's owns and no operation is writing.
    pub fn bytes(&self, offset: usize, length: usize) -> Option<&[u8]> {
        if !self.contains(offset, length) {
            return None;
        }
        #[expect(unsafe_code, reason = "the caller's memory seen as bytes")]
        // SAFETY: within the memory that `Arena::new` was given, which is valid and initialised;
        // the caller owns the slot, so nobody writes there.
        Some(unsafe {
            core::slice::from_raw_parts(self.base.as_ptr().wrapping_add(offset), length)
        })
    }

    /// Fills `target` from the bytes at `offset`; false, and nothing done, when out of bounds.
    #[must_use]
    pub fn copy_out(&self, offset: usize, target: &mut [u8]) -> bool {
        let within = self.contains(offset, target.len());
        if within {
            copy_from(self.base.as_ptr().wrapping_add(offset), target);
        }
        within
    }

    /// Copies `source` to the bytes at `offset`; false, and nothing done, when out of bounds.
    #[must_use]
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> bool {
        let within = self.contains(offset, source.len());
        if within {
            copy_to(self.base.as_ptr().wrapping_add(offset), source);
        }
        within
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Arena({:p}+{})", self.base, self.length)
    }
}

/// Copies from checked memory of an [`Arena`] or an aligned buffer.
pub(super) fn copy_from(address: *const u8, target: &mut [u8]) {
    #[expect(
        unsafe_code,
        reason = "a copy out of memory that the kernel writes, too"
    )]
    // SAFETY: the callers checked that `target.len()` bytes from `address` lie within their
    // memory; the memory belongs to the operation on whose behalf this runs; source and target
    // may overlap only if a caller passes a slice of the arena itself, which `copy` allows.
    unsafe {
        core::ptr::copy(address, target.as_mut_ptr(), target.len());
    }
}

/// Copies to checked memory of an [`Arena`] or an aligned buffer.
pub(super) fn copy_to(address: *mut u8, source: &[u8]) {
    #[expect(unsafe_code, reason = "a copy into memory that the kernel reads, too")]
    // SAFETY: as `copy_from`.
    unsafe {
        core::ptr::copy(source.as_ptr(), address, source.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(unsafe_code, reason = "the test lends its own memory")]
    fn arena(memory: &mut [u8]) -> Arena {
        // SAFETY: every test keeps `memory` until its arena is gone and does not touch it.
        unsafe { Arena::new(memory.as_mut_ptr(), memory.len()) }.unwrap()
    }

    #[test]
    fn bytes_go_in_and_come_out_at_their_offset() {
        let mut memory = vec![0_u8; 100];
        let arena = arena(&mut memory);
        assert!(arena.copy_in(10, &[1, 2, 3]));
        let mut out = [0; 5];
        assert!(arena.copy_out(9, &mut out));
        assert_eq!(out, [0, 1, 2, 3, 0]);
        assert_eq!(arena.bytes(11, 2), Some([2, 3].as_slice()));
    }

    #[test]
    fn nothing_outside_the_arena_is_touched() {
        let mut memory = vec![0_u8; 100];
        let arena = arena(&mut memory);
        assert!(arena.contains(100, 0) && arena.contains(0, 100));
        for (offset, length) in [(0, 101), (100, 1), (usize::MAX, 1), (1, usize::MAX)] {
            assert!(!arena.contains(offset, length));
            assert_eq!(arena.bytes(offset, length), None);
        }
        assert!(!arena.copy_in(98, &[1, 2, 3]));
        assert!(!arena.copy_out(usize::MAX, &mut [0; 2]));
        assert!(memory.iter().all(|byte| *byte == 0));
    }

    #[test]
    #[expect(unsafe_code, reason = "a null address is what the test is about")]
    fn a_null_arena_is_refused() {
        // SAFETY: refused before any access.
        assert!(unsafe { Arena::new(core::ptr::null_mut(), 10) }.is_none());
    }
}
