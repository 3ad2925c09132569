//! Memory that will be looked at soon.

/// Asks the processor to fetch what a reference points at, without waiting for it: the lines of its
/// caches with the first byte and with the last. Nothing else happens, and nothing at all on
/// processors other than x86-64.
#[inline]
pub(crate) fn prefetch<T>(place: Option<&T>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = place {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "the one way to say it")]
        // SAFETY: every x86-64 processor has the instruction; it reads nothing that the program
        // could see, and the reference is valid.
        unsafe {
            let first: *const i8 = core::ptr::from_ref(place).cast();
            _mm_prefetch::<_MM_HINT_T0>(first);
            if size_of::<T>() > align_of::<T>() {
                _mm_prefetch::<_MM_HINT_T0>(first.add(size_of::<T>() - 1));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
