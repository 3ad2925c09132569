//! Memory for tests to lend to a tier or an engine, and folders in memory.

use std::alloc::{Layout, alloc};
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

/// Bytes of a large page on x86-64.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// [`leaked_arena`] in large pages, as far as the kernel has them.
///
/// # Errors
/// When there is no memory.
pub fn leaked_in_large_pages(length: usize) -> Result<Arc<Arena>> {
    let layout = Layout::from_size_align(length, LARGE_PAGE_BYTES)
        .ok()
        .filter(|layout| layout.size() > 0)
        .ok_or_else(|| Error::argument("no arena can be that long"))?;
    #[expect(
        unsafe_code,
        reason = "pages have to be asked for before they are used"
    )]
    // SAFETY: the layout's size is at least 1; the advice and the zeros concern this memory alone, and
    // an advice that is not taken is of no consequence. It is never freed, and zeroed by then.
    let arena = unsafe {
        let base = alloc(layout);
        if base.is_null() {
            return Err(Error::argument("no memory"));
        }
        libc::madvise(base.cast(), length, libc::MADV_HUGEPAGE);
        base.write_bytes(0, length);
        Arena::new(base, length)
    };
    let arena = arena.ok_or_else(|| Error::argument("no arena can be that long"))?;
    Ok(Arc::new(arena))
}

/// Bytes of this process's own memory in large pages; 0 where the kernel does not say.
#[expect(
    clippy::disallowed_methods,
    reason = "a file of the kernel, which is always quick"
)]
pub fn bytes_in_large_pages() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("AnonHugePages:"));
    let words = line.and_then(|line| line.split_whitespace().next());
    words
        .and_then(|kib| kib.parse::<usize>().ok())
        .map_or(0, |kib| kib << 10)
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
