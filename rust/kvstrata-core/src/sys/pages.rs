//! Memory in large pages.

/// Bytes of a large page on x86-64. Where they are larger, less is asked for than there could be.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// An empty vector with room for so many elements, for which the kernel is asked for large pages if it
/// is longer than one: who looks at random elements waits for them alone then, and not for the tables of
/// pages as well. A kernel that has no large pages, or none free, gives small ones.
pub(crate) fn with_capacity<T>(count: usize) -> Vec<T> {
    with_capacity_after(count, 0)
}

/// The same, but for the first bytes: what holds little is to take no large page.
pub(crate) fn with_capacity_after<T>(count: usize, small_bytes: usize) -> Vec<T> {
    let mut memory: Vec<T> = Vec::with_capacity(count);
    let room = memory.spare_capacity_mut();
    let bytes = size_of_val(room);
    let start: *mut u8 = room.as_mut_ptr().cast();
    let skipped = start.align_offset(LARGE_PAGE_BYTES);
    let skipped = skipped.saturating_add(small_bytes.next_multiple_of(LARGE_PAGE_BYTES));
    let whole = bytes.saturating_sub(skipped) / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    if whole > 0 {
        #[expect(unsafe_code, reason = "the one way to say it")]
        // SAFETY: the range is within memory that is ours, and nothing is in it yet; the advice
        // changes no byte of it. An error, which only means small pages, is of no consequence.
        unsafe {
            libc::madvise(start.add(skipped).cast(), whole, libc::MADV_HUGEPAGE);
        }
    }
    memory
}

/// Gives the whole large pages behind the elements of a vector back to the kernel. Its room stays: what
/// is put there later gets new pages.
pub(crate) fn give_back<T>(memory: &mut Vec<T>) {
    let room = memory.spare_capacity_mut();
    let bytes = size_of_val(room);
    let start: *mut u8 = room.as_mut_ptr().cast();
    let skipped = start.align_offset(LARGE_PAGE_BYTES);
    let whole = bytes.saturating_sub(skipped) / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    if whole > 0 {
        #[expect(unsafe_code, reason = "the one way to say it")]
        // SAFETY: the range is within memory that is ours, and nothing is in it: whatever its bytes
        // are afterwards, nobody reads them. An error, which only means that the pages stay, is of
        // no consequence.
        unsafe {
            libc::madvise(start.add(skipped).cast(), whole, libc::MADV_DONTNEED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{give_back, with_capacity};

    #[test]
    fn a_vector_of_any_length_has_room_and_holds_what_is_put_in() {
        for count in [0, 1, 1000, 700_000] {
            let mut numbers = with_capacity::<u64>(count);
            assert!(numbers.is_empty() && numbers.capacity() >= count);
            numbers.resize(count, 7);
            assert!(numbers.iter().all(|number| *number == 7));
        }
    }

    #[test]
    fn a_vector_whose_room_was_given_back_keeps_what_is_in_it_and_takes_more() {
        let mut numbers = with_capacity::<u64>(1 << 21);
        numbers.resize(1 << 21, 7);
        numbers.truncate(1000);
        give_back(&mut numbers);
        numbers.resize(1 << 21, 9);
        let kept = numbers.iter().take(1000).all(|number| *number == 7);
        assert!(kept && numbers.iter().skip(1000).all(|number| *number == 9));
    }
}
