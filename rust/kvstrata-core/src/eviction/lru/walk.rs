//! The walk over the cold end in search of victims.

use super::{Lru, Node, State};
use crate::eviction::order::{Entries as _, Place};
use crate::eviction::{Class, EntryId};

/// What a walk came upon.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Entries that may go, coldest first.
    pub(super) chosen: Vec<EntryId>,
    /// Places that were taken out of the order, coldest first.
    pub(super) passed: Vec<Place>,
}

impl Lru {
    /// Takes places out of a class's order until `need` entries that may go are found; parks the
    /// pinned entries it meets. What was passed is to be put back.
    pub(super) fn walk(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Walk {
        let mut walk = Walk::default();
        let nodes = &mut self.nodes;
        let Some(own) = self.classes.get_mut(usize::from(class.0)) else {
            return walk;
        };
        if own.evictable < need {
            return walk;
        }
        own.order.look_again();
        walk.chosen.reserve(need);
        walk.passed.reserve(need);
        let mut all_late = own.late.iter();
        let mut late = all_late.next();
        while walk.chosen.len() < need {
            self.visited = self.visited.saturating_add(1);
            let place = own.order.pop(nodes);
            let node = place.and_then(|place| nodes.get_mut(place.number));
            let number = match (place, node, late) {
                (place, node, Some((tick, number)))
                    if node.as_ref().is_none_or(|node| node.tick > *tick) =>
                {
                    if let Some(place) = place {
                        own.order.put_back(place);
                    }
                    late = all_late.next();
                    *number
                }
                (Some(place), Some(node), _) => {
                    if node.pins > 0 {
                        node.state = State::Parked;
                        continue;
                    }
                    walk.passed.push(place);
                    place.number
                }
                _ => break,
            };
            if !protected(EntryId(number)) {
                walk.chosen.push(EntryId(number));
            }
        }
        walk
    }

    /// Puts what a walk took out back, but for what was forgotten since.
    pub(super) fn put_back(&mut self, class: Class, passed: Vec<Place>) {
        let nodes = &self.nodes;
        if let Some(own) = self.classes.get_mut(usize::from(class.0)) {
            for place in passed.into_iter().rev() {
                if nodes.is_current(place) {
                    own.order.put_back(place);
                }
            }
        }
    }

    /// Forgets entries of a class that may go.
    pub(super) fn forget(&mut self, class: Class, entries: &[EntryId]) {
        let Some(own) = self.classes.get_mut(usize::from(class.0)) else {
            return;
        };
        let (mut slot, mut left) = (None, 0);
        for entry in entries {
            let Some(node) = self.nodes.get_mut(entry.0) else {
                continue;
            };
            if node.state == State::Late {
                own.late.remove(&node.tick);
            }
            let container = node.container;
            *node = Node::ABSENT;
            if slot != Some(container)
                && let Some(slot) = slot.replace(container)
            {
                self.containers.leave_unpinned(slot, left);
                left = 0;
            }
            left += 1;
        }
        if let Some(slot) = slot {
            self.containers.leave_unpinned(slot, left);
        }
        self.length = self.length.saturating_sub(entries.len());
        own.entries = own.entries.saturating_sub(entries.len());
        own.evictable = own.evictable.saturating_sub(entries.len());
    }
}
