//! Blocks and entries by number, and where benchmarks of policies place them.

#![expect(
    clippy::expect_used,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use kvstrata_core::eviction::{Class, ContainerId, Placement};

/// The one class and container of all entries.
pub(crate) const PLACEMENT: Placement = Placement {
    class: Class(0),
    container: ContainerId(0),
};
/// The number of nothing.
pub(crate) const ABSENT: u32 = u32::MAX;

/// A number as a place in a list.
pub(crate) fn at(number: u32) -> usize {
    usize::try_from(number).expect("small")
}

/// A place in a list as a number.
pub(crate) fn number(count: usize) -> u32 {
    u32::try_from(count).expect("small")
}
