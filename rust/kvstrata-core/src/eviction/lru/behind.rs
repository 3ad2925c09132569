//! Entries that a request adds to its earlier ones.

use super::{Lru, State};

impl Lru {
    /// Puts a detached node next to another of its class, on its cold side and with its tick; at the
    /// warm end where that one is not there. One that is in no list has a colder neighbour in none.
    pub(super) fn attach_behind(&mut self, number: u32, warmer: u32) {
        let Some(neighbour) = self.node(warmer).copied().filter(|_| warmer != number) else {
            self.attach_warmest(number);
            return;
        };
        let class = self.containers.class(neighbour.container);
        let Some(node) = self.node_mut(number) else {
            return;
        };
        node.tick = neighbour.tick;
        let own = node.container;
        if class != self.containers.class(own) {
            self.attach_warmest(number);
            return;
        }
        // A container was used when anything came to it.
        let tick = self.next_tick();
        self.containers.accessed(own, tick);
        let order = class.and_then(|class| self.classes.get_mut(usize::from(class.0)));
        let Some(order) = order else {
            return;
        };
        if neighbour.state == State::Listed {
            order
                .list
                .insert_colder_than(&mut self.nodes, warmer, number);
        } else {
            order.late.insert((neighbour.tick, number));
            if let Some(node) = self.node_mut(number) {
                node.state = State::Late;
            }
        }
    }
}
