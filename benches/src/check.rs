//! The checksum that a tier would compute of each row, for who moves rows without one.

use std::hint::black_box;
use std::sync::Arc;

use kvstrata_core::buffer::Arena;
use kvstrata_core::error::Result;
use kvstrata_core::format::checksum::row_checksum;
use kvstrata_core::format::superblock::NamespaceDigest;
use kvstrata_core::key::Key;

/// The work of checking rows; nobody uses the result.
#[derive(Clone, Debug)]
pub struct Check {
    arena: Arc<Arena>,
    key: Key,
    row_bytes: usize,
}

impl Check {
    /// For rows of `row_bytes` in this arena.
    ///
    /// # Errors
    /// Never: the key is a valid one.
    pub fn new(arena: &Arc<Arena>, row_bytes: usize) -> Result<Self> {
        Ok(Self {
            arena: Arc::clone(arena),
            key: Key::new(&[3; 36])?,
            row_bytes,
        })
    }

    /// Bytes of a row.
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Sums the row in the slot at `offset`.
    pub fn row(&self, offset: usize) {
        let payload = self.arena.bytes(offset, self.row_bytes).unwrap_or_default();
        black_box(row_checksum(&NamespaceDigest([7; 32]), &self.key, payload));
    }
}
