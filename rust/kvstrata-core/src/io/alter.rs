//! The seam between the kernel's answers and the engines, for tests.

use core::time::Duration;

use super::Operation;
use crate::sys::sync::Arc;

/// What an engine is told of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Bytes moved, or an errno below zero.
    pub result: i32,
    /// How much later than the kernel's; the call is under way until then.
    pub after: Duration,
}

impl From<i32> for Answer {
    /// At once.
    fn from(result: i32) -> Self {
        Self {
            result,
            after: Duration::ZERO,
        }
    }
}

/// Takes the kernel's answer to a call (bytes, or an errno below zero) and says what the engine is
/// told instead: how a test makes the kernel stumble.
pub type Alter = Arc<dyn Fn(&Operation, i32) -> Answer + Send + Sync>;
