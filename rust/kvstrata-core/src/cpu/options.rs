//! What a CPU tier is made from.

use crate::key::GroupId;

/// The arena, the rows and the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// What every slot's offset is a multiple of; a power of two.
    pub align: u64,
    /// Payload bytes of a row per group.
    pub row_bytes: Vec<(GroupId, u64)>,
    /// Name of an eviction policy.
    pub policy: String,
}

impl CpuOptions {
    /// The place of a group among the row sizes.
    pub(super) fn position(&self, group: GroupId) -> Option<usize> {
        self.row_bytes.iter().position(|(id, _)| *id == group)
    }
}
