//! Entries that a request adds to its earlier ones.

use super::{Lru, State};

impl Lru {
    /// Puts a detached node next to another of its class, on its cold side and with its tick; at the
    /// warm end where that one is not there. One that is in no order has a colder neighbour in none.
    pub(super) fn attach_behind(&mut self, number: u32, warmer: u32) {
        let Some(neighbour) = self.node(warmer).copied().filter(|_| warmer != number) else {
            self.renew(number);
            return;
        };
        let class = self.containers.class(neighbour.container);
        let Some(node) = self.node_mut(number) else {
            return;
        };
        node.tick = neighbour.tick;
        let own = node.container;
        if class != self.containers.class(own) {
            self.renew(number);
            return;
        }
        // A container was used when anything came to it.
        let tick = self.next_tick();
        self.containers.accessed(own, tick);
        let class = class.and_then(|class| self.classes.get_mut(usize::from(class.0)));
        let Some(class) = class else {
            return;
        };
        let nodes = &mut self.nodes;
        if neighbour.state == State::Listed {
            let order = &mut class.order;
            let place = self
                .chunks
                .insert_colder_than(order, neighbour.place, number, nodes);
            if let Some(node) = nodes.get_mut(number) {
                node.place = place;
                node.state = State::Listed;
            }
            self.chunks.tidy(order, nodes);
        } else {
            class.late.insert((neighbour.tick(), number));
            if let Some(node) = nodes.get_mut(number) {
                node.state = State::Late;
            }
        }
    }
}
