//! Memory that the kernel reads and writes: the caller's arena, and aligned buffers of our own.
//!
//! *Who may touch what.* Bytes that an operation names belong to it from its submission to its
//! completion; until then nobody else reads or writes them, except that a buffer whose contents
//! mean nothing (the scratch page) may be the target of many reads at once, and one that never
//! changes (the zero page) the source of many writes. The tier keeps this rule for rows by pinning
//! them and their slots; it is what makes the raw pointers of this module sound.

pub mod aligned;
pub mod arena;

pub use aligned::AlignedBuffer;
pub use arena::Arena;

use crate::sys::sync::Arc;

/// Memory an operation moves bytes into or out of, kept alive by the operation.
#[derive(Clone, Debug)]
pub enum Memory {
    /// The caller's arena.
    Arena(Arc<Arena>),
    /// A buffer of our own.
    Buffer(Arc<AlignedBuffer>),
}

impl Memory {
    /// Bytes of the memory.
    pub fn length(&self) -> usize {
        match self {
            Self::Arena(arena) => arena.length(),
            Self::Buffer(buffer) => buffer.len(),
        }
    }

    /// Address of the byte at `offset` when `length` bytes from there lie within the memory.
    pub fn address(&self, offset: usize, length: usize) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        let base = match self {
            Self::Arena(arena) => arena.base(),
            Self::Buffer(buffer) => buffer.base(),
        };
        (end <= self.length()).then(|| base.wrapping_add(offset))
    }

    /// Fills `target` from the bytes at `offset`; false, and nothing done, when out of bounds.
    #[must_use]
    pub fn copy_out(&self, offset: usize, target: &mut [u8]) -> bool {
        self.address(offset, target.len()).is_some_and(|address| {
            arena::copy_from(address, target);
            true
        })
    }

    /// Copies `source` to the bytes at `offset`; false, and nothing done, when out of bounds.
    #[must_use]
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> bool {
        self.address(offset, source.len()).is_some_and(|address| {
            arena::copy_to(address, source);
            true
        })
    }
}
