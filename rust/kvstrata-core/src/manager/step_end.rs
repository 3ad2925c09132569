//! What came of a step, for whoever drives the tiers below.

use crate::cpu::Handle;
use crate::key::Key;

/// Rows to be loaded from one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The tier's number.
    pub tier: usize,
    /// The rows.
    pub keys: Vec<Key>,
    /// First byte of each row's slot.
    pub offsets: Vec<u64>,
    /// The use of each slot.
    pub handles: Vec<Handle>,
}

/// What came of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepEnd {
    /// Loads to be started, one per tier.
    pub starts: Vec<Start>,
    /// Keys whose rows made room, or were refused and nobody uses them any more.
    pub evicted: Vec<Key>,
    /// A key that a request has waited for too long, if any.
    pub timed_out: Option<Key>,
}
