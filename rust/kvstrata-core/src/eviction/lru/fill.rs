//! Many entries at once.
//!
//! Millions of nodes do not fit the processor's caches, and every look at one in the order of last
//! accesses waits for memory. So there is one pass in the order of the nodes, and one in that of
//! the list, in which some nodes that come next are looked at together: those waits overlap.

use super::{Lru, State, TOGETHER};
use crate::eviction::containers::Slot;
use crate::eviction::{EntryId, Placement};

impl Lru {
    /// See [`EvictionPolicy::fill`](crate::eviction::EvictionPolicy::fill).
    pub(super) fn fill_empty(
        &mut self,
        placements: &mut dyn Iterator<Item = (EntryId, Placement)>,
        coldest_first: &mut dyn Iterator<Item = EntryId>,
    ) {
        debug_assert!(self.length == 0, "a policy is filled once");
        for (entry, placement) in placements {
            self.place(entry, placement, State::Parked);
        }
        let mut numbers = Vec::with_capacity(TOGETHER);
        let mut containers = Vec::with_capacity(TOGETHER);
        loop {
            numbers.clear();
            numbers.extend((&mut *coldest_first).take(TOGETHER).map(|entry| entry.0));
            if numbers.is_empty() {
                break;
            }
            containers.clear();
            containers.extend(numbers.iter().map(|number| self.parked(*number)));
            for (number, container) in numbers.iter().zip(&containers) {
                if let Some(container) = container {
                    self.append(*number, *container);
                }
            }
        }
        self.containers.sort();
    }

    /// The container of a node that [`Lru::place`] left out of the list.
    fn parked(&self, number: u32) -> Option<Slot> {
        let node = self.nodes.get(number)?;
        (node.state == State::Parked).then_some(node.container)
    }

    /// Puts such a node at the warm end; the order of containers is left to be made at the end.
    fn append(&mut self, number: u32, container: Slot) {
        self.tick = self.tick.saturating_add(1);
        let Some(node) = self.nodes.get_mut(number) else {
            return;
        };
        node.tick = self.tick.to_le_bytes();
        node.state = State::Listed;
        let class = self.containers.last_access(container, self.tick);
        if let Some(own) = class.and_then(|class| self.classes.get_mut(usize::from(class.0))) {
            node.place = self.chunks.push_warmest(&mut own.order, number);
        }
    }
}
