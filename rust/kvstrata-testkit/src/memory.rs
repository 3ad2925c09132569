//! Memory for tests to lend to a tier or an engine, and folders in memory.

use std::io;
use std::sync::Arc;

use tempfile::TempDir;

use kvstrata_core::buffer::aligned::PAGE_BYTES;
use kvstrata_core::buffer::{AlignedBuffer, Arena};
use kvstrata_core::error::{Error, Result};

/// A folder in memory, removed with its value. By its name the Python tests, which may run beside
/// these and look for what is left there, know that it is not theirs.
///
/// # Errors
/// The system's.
pub fn folder() -> io::Result<TempDir> {
    tempfile::Builder::new()
        .prefix("kvstrata-rust-")
        .tempdir_in("/dev/shm")
}

/// An arena of `length` zero bytes, `misalignment` bytes after a page boundary.
///
/// Its memory is never freed, so whatever a test leaves under way stays harmless.
///
/// # Errors
/// When there is no memory.
pub fn leaked_arena(length: usize, misalignment: usize) -> Result<Arc<Arena>> {
    leaked(length, misalignment).map(Arc::new)
}

/// [`leaked_arena`] for who wants to own it.
///
/// # Errors
/// When there is no memory.
pub fn leaked(length: usize, misalignment: usize) -> Result<Arena> {
    let buffer = AlignedBuffer::zeroed(length.saturating_add(misalignment), PAGE_BYTES)?;
    let base = Box::leak(Box::new(buffer))
        .base()
        .wrapping_add(misalignment);
    #[expect(unsafe_code, reason = "an arena vouches for its memory")]
    // SAFETY: the memory was just made for this arena, is zeroed and never freed.
    let arena = unsafe { Arena::new(base, length) };
    arena.ok_or_else(|| Error::argument("no arena can be that long"))
}
