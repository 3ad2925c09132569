//! What a CPU tier is made from.

use crate::eviction::admission::AdmissionOptions;
use crate::key::GroupId;

/// The arena, the rows and the policy.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuOptions {
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// What every slot's offset is a multiple of; a power of two.
    pub align: u64,
    /// Payload bytes of a row per group.
    pub row_bytes: Vec<(GroupId, u64)>,
    /// Name of an eviction policy.
    pub policy: String,
    /// Keys that the policy's directory has at most, if it has one; `None`: its default.
    pub directory: Option<usize>,
    /// Which rows of workers are taken.
    pub admission: AdmissionOptions,
    /// Thousandths of the arena whose rows stay for waiting requests; 0 for none.
    pub awaited_share: u32,
}

/// Half of the arena: the other half is for rows that are being stored.
pub(super) const AWAITED_SHARE: u32 = 500;

impl Default for CpuOptions {
    /// No arena and no rows; the defaults of everything else.
    fn default() -> Self {
        Self {
            arena_bytes: 0,
            align: 64,
            row_bytes: Vec::new(),
            policy: "lru".to_owned(),
            directory: None,
            admission: AdmissionOptions::default(),
            awaited_share: AWAITED_SHARE,
        }
    }
}

impl CpuOptions {
    /// The place of a group among the row sizes.
    pub(super) fn position(&self, group: GroupId) -> Option<usize> {
        self.row_bytes.iter().position(|(id, _)| *id == group)
    }
}
