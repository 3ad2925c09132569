//! An allocator that counts: what a structure takes, and the most that was taken at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Blocks from here on may be longer than what of them was ever used.
const LARGE_BYTES: usize = 1 << 20;
/// Most of them whose use is looked at; of others all counts.
const LARGE_MAX: usize = 512;
const PAGE_BYTES: usize = 4096;

/// Start and length of a large block; 0 and 0 where there is none.
#[derive(Debug)]
struct Large(AtomicUsize, AtomicUsize);

/// The system's allocator, counting bytes. Name one as `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting {
    live: AtomicUsize,
    peak: AtomicUsize,
    large: [Large; LARGE_MAX],
}

impl Default for Counting {
    fn default() -> Self {
        Self::new()
    }
}

impl Large {
    /// Bytes of whole pages that no memory was ever needed for.
    fn unused_bytes(&self) -> usize {
        let (start, length) = (
            self.0.load(Ordering::Acquire),
            self.1.load(Ordering::Relaxed),
        );
        let first = start.next_multiple_of(PAGE_BYTES);
        let pages = (start + length).saturating_sub(first) / PAGE_BYTES;
        if start == 0 || pages == 0 {
            return 0;
        }
        let mut present = [0_u8; 512];
        let mut unused = 0;
        for page in (0..pages).step_by(present.len()) {
            let count = present.len().min(pages - page);
            let at = core::ptr::with_exposed_provenance_mut(first + page * PAGE_BYTES);
            #[expect(unsafe_code, reason = "the kernel is asked which pages there are")]
            // SAFETY: the kernel writes a byte for each page, for which there is room; of a range
            // that is not mapped it says so.
            let answer = unsafe { libc::mincore(at, count * PAGE_BYTES, present.as_mut_ptr()) };
            let asked = present.iter().take(count);
            if answer == 0 {
                unused += asked.filter(|page| **page & 1 == 0).count();
            }
        }
        unused * PAGE_BYTES
    }
}

impl Counting {
    /// An allocator that has counted nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            large: [const { Large(AtomicUsize::new(0), AtomicUsize::new(0)) }; LARGE_MAX],
        }
    }

    /// Bytes allocated and not freed, without the allocator's own overhead, and without the pages
    /// of large blocks that were never touched: those take addresses alone.
    pub fn live_bytes(&self) -> usize {
        let unused: usize = self.large.iter().map(Large::unused_bytes).sum();
        self.live.load(Ordering::Relaxed).saturating_sub(unused)
    }

    /// The most bytes allocated and not freed since the last call of this, touched or not.
    pub fn take_peak_bytes(&self) -> usize {
        let live = self.live.load(Ordering::Relaxed);
        self.peak.swap(live, Ordering::Relaxed)
    }

    fn grown(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    /// Notes a block that was handed out.
    fn handed_out(&self, pointer: *mut u8, bytes: usize) {
        if bytes < LARGE_BYTES || pointer.is_null() {
            return;
        }
        for large in &self.large {
            let free = large
                .1
                .compare_exchange(0, bytes, Ordering::Relaxed, Ordering::Relaxed);
            if free.is_ok() {
                large
                    .0
                    .store(pointer.expose_provenance(), Ordering::Release);
                return;
            }
        }
    }

    /// Forgets a block that comes back.
    fn comes_back(&self, pointer: *mut u8, bytes: usize) {
        if bytes < LARGE_BYTES {
            return;
        }
        let start = pointer.addr();
        let noted = |large: &&Large| large.0.load(Ordering::Relaxed) == start;
        if let Some(large) = self.large.iter().find(noted) {
            large.0.store(0, Ordering::Relaxed);
            large.1.store(0, Ordering::Release);
        }
    }
}

#[expect(unsafe_code, reason = "an allocator hands out memory")]
// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.grown(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        let pointer = unsafe { System.alloc(layout) };
        self.handed_out(pointer, layout.size());
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.grown(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        self.handed_out(pointer, layout.size());
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        self.comes_back(pointer, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.grown(size);
        self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        self.comes_back(pointer, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        let pointer = unsafe { System.realloc(pointer, layout, size) };
        self.handed_out(pointer, size);
        pointer
    }
}
