//! A vector in pieces of one size: growing moves nothing and wastes little, so it takes no time
//! that grows with what is there, and no memory for what may come.

use crate::sys::pages;

/// Elements of a piece, as a power of two, where nothing else is said.
const CHUNK_BITS: u32 = 14;
/// Elements of a piece.
pub(crate) const CHUNK: usize = 1 << CHUNK_BITS;
/// The same for what is looked at in random order: a piece is some large pages. What is not used of
/// it yet takes address space alone.
pub(crate) const LARGE_BITS: u32 = 19;

/// Bytes at the beginning that are in small pages.
const SMALL_BYTES: usize = 1 << 20;

/// Elements numbered from 0 by `u32`, two to the power of `BITS` in a piece; see the module.
#[derive(Debug)]
pub(crate) struct Chunked<T, const BITS: u32 = CHUNK_BITS> {
    /// All are full but the last.
    chunks: Vec<Vec<T>>,
}

impl<T, const BITS: u32> Default for Chunked<T, BITS> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> Chunked<T> {
    /// Takes pieces that were filled elsewhere, each with room for [`CHUNK`] elements. All but the
    /// last must be full.
    pub(crate) fn from_chunks(chunks: Vec<Vec<T>>) -> Self {
        debug_assert!(chunks.iter().rev().skip(1).all(|one| one.len() == CHUNK));
        Self { chunks }
    }
}

impl<T, const BITS: u32> Chunked<T, BITS> {
    const PIECE: usize = 1 << BITS;

    /// Which piece an element is in, and where in it.
    fn split(number: u32) -> (usize, usize) {
        let wide = usize::try_from(number).unwrap_or(usize::MAX);
        (wide >> BITS, wide & (Self::PIECE - 1))
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        let full = self.chunks.len().saturating_sub(1);
        self.chunks
            .last()
            .map_or(0, |last| full * Self::PIECE + last.len())
    }

    /// An element.
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let (chunk, at) = Self::split(number);
        self.chunks.get(chunk)?.get(at)
    }

    /// An element, to change it.
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let (chunk, at) = Self::split(number);
        self.chunks.get_mut(chunk)?.get_mut(at)
    }

    /// Adds an element at the end.
    pub(crate) fn push(&mut self, element: T) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < Self::PIECE => last.push(element),
            _ => {
                let small = if self.chunks.is_empty() {
                    SMALL_BYTES
                } else {
                    0
                };
                let mut chunk = pages::with_capacity_after(Self::PIECE, small);
                chunk.push(element);
                self.chunks.push(chunk);
            }
        }
    }

    /// All elements in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    /// Bytes of memory held, without the allocator's own and without what was never used.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.len() * size_of::<T>() + self.chunks.capacity() * size_of::<Vec<T>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_keep_their_numbers_over_the_ends_of_pieces() {
        let mut numbers = Chunked::<u32>::default();
        let count = u32::try_from(CHUNK * 2 + 3).unwrap();
        for number in 0..count {
            numbers.push(number);
            assert_eq!(numbers.len(), usize::try_from(number).unwrap() + 1);
        }
        assert!((0..count).all(|number| numbers.get(number) == Some(&number)));
        assert_eq!(numbers.get(count), None);
        *numbers.get_mut(5).unwrap() = 0;
        assert_eq!(numbers.iter().filter(|number| **number == 0).count(), 2);
    }

    #[test]
    fn an_empty_one_takes_no_memory() {
        assert_eq!(Chunked::<u64>::default().memory_bytes(), 0);
        assert_eq!(Chunked::<u64>::default().len(), 0);
    }
}
