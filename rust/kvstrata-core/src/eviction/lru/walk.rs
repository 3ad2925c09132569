//! The walk over the cold end in search of victims, and what is asked for before it is looked at.

use super::{Lru, Node, Nodes, State};
use crate::eviction::containers::Slot;
use crate::eviction::order::{Chunks, Order, Walk};
use crate::eviction::{Class, EntryId};
use crate::sys::prefetch::prefetch;

/// The next entry of a walk; nodes of later ones are asked for.
fn next(chunks: &mut Chunks, order: &mut Order, walk: &mut Walk, nodes: &Nodes) -> Option<u32> {
    let ask = |number| prefetch(nodes.get(number));
    chunks.next(order, walk, &ask)
}

impl Lru {
    /// The coldest `need` entries that may go, or None; parks the pinned entries it meets.
    pub(super) fn choose(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        let own = self.classes.get_mut(usize::from(class.0))?;
        let (chunks, nodes) = (&mut self.chunks, &mut self.nodes);
        let mut chosen = Vec::with_capacity(need);
        let mut all_late = own.late.iter().copied().peekable();
        let mut walk = Walk::new();
        let mut listed = next(chunks, &mut own.order, &mut walk, nodes);
        while chosen.len() < need {
            let node = listed.and_then(|number| nodes.get_mut(number));
            let is_late = match (all_late.peek(), node.as_ref()) {
                (Some((tick, _)), Some(node)) => node.tick() >= *tick,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => break,
            };
            self.visited = self.visited.saturating_add(1);
            let candidate = if is_late {
                all_late.next().map(|(_, number)| number)
            } else {
                let found = listed;
                if let Some(node) = node.filter(|node| node.pins > 0) {
                    node.state = State::Parked;
                    chunks.remove(&mut own.order, node.place);
                    listed = next(chunks, &mut own.order, &mut walk, nodes);
                    continue;
                }
                listed = next(chunks, &mut own.order, &mut walk, nodes);
                found
            };
            let free = candidate.map(EntryId).filter(|entry| !protected(*entry));
            chosen.extend(free);
        }
        chunks.end(&mut own.order);
        (chosen.len() == need).then_some(chosen)
    }

    /// Forgets victims of a class.
    pub(super) fn forget(&mut self, class: Class, victims: &[EntryId]) {
        let Some(own) = self.classes.get_mut(usize::from(class.0)) else {
            return;
        };
        let (mut container, mut left) = (Slot::MAX, 0);
        for victim in victims {
            let Some(node) = self.nodes.get_mut(victim.0) else {
                continue;
            };
            let node = core::mem::replace(node, Node::ABSENT);
            if node.state == State::Listed {
                self.chunks.remove(&mut own.order, node.place);
            } else {
                own.late.remove(&(node.tick(), victim.0));
            }
            if node.container != container {
                self.containers.leave_unpinned(container, left);
                (container, left) = (node.container, 0);
            }
            left += 1;
        }
        self.containers.leave_unpinned(container, left);
        own.evictable = own.evictable.saturating_sub(victims.len());
        self.length = self.length.saturating_sub(victims.len());
    }

    /// Asks for the nodes of some entries and for what is beside them in the order: they will be
    /// looked at soon.
    pub(super) fn prefetch(&self, entries: &[EntryId]) {
        for entry in entries {
            prefetch(self.nodes.get(entry.0));
        }
        for node in entries.iter().filter_map(|entry| self.nodes.get(entry.0)) {
            self.chunks.prefetch(node.place);
        }
    }
}
