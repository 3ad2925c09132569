//! Fields at fixed offsets of a fixed block of bytes.

/// `N` bytes at a fixed offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<const N: usize> {
    start: usize,
}

impl<const N: usize> Field<N> {
    /// The field at the start of a block.
    pub(super) const fn first() -> Self {
        Self { start: 0 }
    }

    /// The field right behind `previous`.
    pub(super) const fn after<const M: usize>(previous: Field<M>) -> Self {
        Self {
            start: previous.end(),
        }
    }

    /// Offset of the first byte.
    pub(super) const fn start(self) -> usize {
        self.start
    }

    /// Offset behind the last byte.
    pub(super) const fn end(self) -> usize {
        self.start + N
    }

    /// The field's bytes. Every block's size is asserted at compile time to hold its fields; a
    /// shorter slice would read as zeros.
    pub(super) fn read(self, block: &[u8]) -> [u8; N] {
        block
            .get(self.start..)
            .and_then(<[u8]>::first_chunk)
            .copied()
            .unwrap_or([0; N])
    }

    /// Puts `value` into `block`.
    pub(super) fn write(self, block: &mut [u8], value: [u8; N]) {
        if let Some(target) = block.get_mut(self.start..self.end()) {
            target.copy_from_slice(&value);
        }
    }
}
