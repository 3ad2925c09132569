//! What the order keeps of an entry.

use crate::chunked::{Chunked, LARGE_BITS};
use crate::eviction::containers::Slot;
use crate::eviction::order::{Entries, Place};

/// Bytes of memory per entry, besides its place in the order, parked entries and containers.
pub const ENTRY_BYTES: usize = 20;
const _: () = assert!(size_of::<Node>() == ENTRY_BYTES);

/// Where a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The handle is unused.
    Absent,
    /// In the class's order, pinned or not.
    Listed,
    /// Pinned and out of the order.
    Parked,
    /// Unpinned, in the class's late map.
    Late,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// As bytes, which need no alignment.
    pub(super) tick: [u8; 8],
    pub(super) place: Place,
    pub(super) container: Slot,
    pub(super) pins: u16,
    pub(super) state: State,
}

impl Node {
    pub(super) const ABSENT: Self = Self {
        tick: [0; 8],
        place: Place::NOWHERE,
        container: Slot::MAX,
        pins: 0,
        state: State::Absent,
    };

    pub(super) const fn tick(&self) -> u64 {
        u64::from_le_bytes(self.tick)
    }
}

/// Nodes by number.
pub(super) type Nodes = Chunked<Node, LARGE_BITS>;

impl Entries for Nodes {
    fn moved(&mut self, number: u32, place: Place) {
        if let Some(node) = self.get_mut(number) {
            node.place = place;
        }
    }
}
