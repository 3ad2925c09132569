//! Least recently used.
//!
//! One order per class (`order`), of nodes that are numbered by handle: 20 bytes per entry
//! ([`ENTRY_BYTES`]) and 5 to 10 in the order, every change in constant time.
//!
//! Pinned entries stay where they are in the order, so that an unpin costs nothing and keeps it. The
//! first eviction that meets a pinned entry at the cold end *parks* it: it leaves the order, so later
//! evictions do not meet it again. When a parked entry is unpinned it goes to the class's *late* map,
//! ordered by tick, from which evictions take as from the order. Rows in use are seldom cold, so the
//! late map is almost always empty.

mod behind;
mod fill;
mod node;
mod walk;

use std::collections::BTreeSet;

use super::containers::{Containers, Slot};
use super::order::{Chunks, Order};
use super::request::{EndedKey, Tag};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};
use node::{Node, Nodes, State};

pub use node::ENTRY_BYTES;

/// Entries of a request that are asked for before the first of them is looked at.
const TOGETHER: usize = 64;

/// So many pins are not counted any more: the entry stays pinned for good.
const PINS_LOST: u16 = u16::MAX;

#[derive(Debug, Default)]
struct ClassOrder {
    order: Order,
    /// Ticks and numbers: rows that a request adds to its earlier ones share a tick with them.
    late: BTreeSet<(u64, u32)>,
    evictable: usize,
}

/// The policy; see the module.
#[derive(Debug, Default)]
pub struct Lru {
    nodes: Nodes,
    chunks: Chunks,
    classes: Vec<ClassOrder>,
    containers: Containers,
    tick: u64,
    length: usize,
    visited: u64,
}

impl Lru {
    /// A policy without entries.
    pub fn new() -> Self {
        Self::default()
    }

    fn node(&self, number: u32) -> Option<&Node> {
        let node = self.nodes.get(number)?;
        (node.state != State::Absent).then_some(node)
    }

    fn node_mut(&mut self, number: u32) -> Option<&mut Node> {
        let node = self.nodes.get_mut(number)?;
        (node.state != State::Absent).then_some(node)
    }

    fn order(&self, class: Class) -> Option<&ClassOrder> {
        self.classes.get(usize::from(class.0))
    }

    fn order_mut(&mut self, class: Class) -> Option<&mut ClassOrder> {
        self.classes.get_mut(usize::from(class.0))
    }

    fn next_tick(&mut self) -> u64 {
        self.tick = self.tick.saturating_add(1);
        self.tick
    }

    /// Takes a node out of the order or the late map, whichever it is in.
    fn detach(&mut self, number: u32) {
        let Some(node) = self.node(number).copied() else {
            return;
        };
        let Some(class) = self.containers.class(node.container) else {
            return;
        };
        let Some(own) = self.classes.get_mut(usize::from(class.0)) else {
            return;
        };
        match node.state {
            State::Listed => self.chunks.remove(&mut own.order, node.place),
            State::Late => {
                own.late.remove(&(node.tick(), number));
            }
            State::Parked | State::Absent => {}
        }
    }

    /// Makes a node of an entry that has none; it is in no order yet.
    fn place(&mut self, entry: EntryId, placement: Placement, state: State) {
        let Ok(index) = usize::try_from(entry.0) else {
            return;
        };
        if entry.0 == u32::MAX {
            return;
        }
        while self.nodes.len() <= index {
            self.nodes.push(Node::ABSENT);
        }
        let class = usize::from(placement.class.0);
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, ClassOrder::default);
        }
        let container = self.containers.enter(placement);
        if let Some(node) = self.nodes.get_mut(entry.0) {
            *node = Node {
                container,
                state,
                ..Node::ABSENT
            };
        }
        self.length += 1;
        self.change_evictable(container, true);
    }

    /// Puts a node at the warm end with a new tick, wherever it was.
    #[inline]
    fn renew(&mut self, number: u32) {
        let tick = self.next_tick();
        let Some(node) = self.nodes.get_mut(number) else {
            return;
        };
        if node.state == State::Absent {
            return;
        }
        let class = self.containers.accessed(node.container, tick);
        let Some(own) = class.and_then(|class| self.classes.get_mut(usize::from(class.0))) else {
            return;
        };
        match node.state {
            State::Listed => self.chunks.remove(&mut own.order, node.place),
            State::Late => {
                own.late.remove(&(node.tick(), number));
            }
            State::Parked | State::Absent => {}
        }
        node.tick = tick.to_le_bytes();
        node.state = State::Listed;
        node.place = self.chunks.push_warmest(&mut own.order, number);
        self.chunks.tidy(&mut own.order, &mut self.nodes);
    }

    fn change_evictable(&mut self, container: Slot, more: bool) {
        let Some(class) = self.containers.class(container) else {
            return;
        };
        if let Some(order) = self.order_mut(class) {
            order.evictable = if more {
                order.evictable.saturating_add(1)
            } else {
                order.evictable.saturating_sub(1)
            };
        }
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn ended(&mut self, _class: Class, keys: &[EndedKey]) {
        for entry in keys.iter().rev().filter_map(|key| key.entry) {
            self.access(entry);
        }
    }

    fn insert(&mut self, entry: EntryId, _tag: Tag, placement: Placement) {
        self.remove(entry);
        self.place(entry, placement, State::Parked);
        self.renew(entry.0);
    }

    fn insert_behind(&mut self, head_first: &[(EntryId, Tag, Placement)], behind: EntryId) {
        let mut warmer = behind;
        for (entry, _, placement) in head_first {
            self.remove(*entry);
            self.place(*entry, *placement, State::Parked);
            self.attach_behind(entry.0, warmer.0);
            warmer = *entry;
        }
    }

    fn arrange(&mut self, head_first: &[EntryId]) {
        self.access_request(head_first);
    }

    fn fill(
        &mut self,
        placements: &mut dyn Iterator<Item = (EntryId, Tag, Placement)>,
        coldest_first: &mut dyn Iterator<Item = EntryId>,
    ) {
        self.fill_empty(
            &mut placements.map(|(entry, _, placement)| (entry, placement)),
            coldest_first,
        );
    }

    fn access(&mut self, entry: EntryId) {
        self.renew(entry.0);
    }

    fn access_request(&mut self, head_first: &[EntryId]) {
        for together in head_first.rchunks(TOGETHER) {
            self.prefetch(together);
            for entry in together.iter().rev() {
                self.renew(entry.0);
            }
        }
    }

    fn remove(&mut self, entry: EntryId) {
        let Some(node) = self.node(entry.0).copied() else {
            return;
        };
        self.detach(entry.0);
        if node.pins == 0 {
            self.change_evictable(node.container, false);
        }
        self.containers.leave(node.container, node.pins > 0);
        if let Some(node) = self.node_mut(entry.0) {
            *node = Node::ABSENT;
        }
        self.length = self.length.saturating_sub(1);
    }

    fn pin(&mut self, entry: EntryId) {
        let Some(node) = self.node_mut(entry.0) else {
            return;
        };
        let (pins, state, container) = (node.pins, node.state, node.container);
        if state == State::Late {
            self.detach(entry.0);
        }
        if let Some(node) = self.node_mut(entry.0) {
            node.pins = pins.saturating_add(1);
            if state == State::Late {
                node.state = State::Parked;
            }
        }
        if pins == 0 {
            self.containers.pinned(container);
            self.change_evictable(container, false);
        }
    }

    fn unpin(&mut self, entry: EntryId) {
        let Some(node) = self.node_mut(entry.0) else {
            return;
        };
        if node.pins == 0 {
            return;
        }
        if node.pins == PINS_LOST {
            return;
        }
        node.pins -= 1;
        if node.pins > 0 {
            return;
        }
        let returns = node.state == State::Parked;
        if returns {
            node.state = State::Late;
        }
        let (tick, container) = (node.tick(), node.container);
        self.containers.unpinned(container);
        self.change_evictable(container, true);
        if let Some(class) = self.containers.class(container).filter(|_| returns)
            && let Some(order) = self.order_mut(class)
        {
            order.late.insert((tick, entry.0));
        }
    }

    fn evictable(&self, class: Class) -> usize {
        self.order(class).map_or(0, |order| order.evictable)
    }

    fn evict(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> bool {
        let Some(chosen) = self.next_victims(need, class, protected) else {
            return false;
        };
        self.forget(class, &chosen);
        victims.extend(chosen);
        true
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        if need == 0 {
            return Some(Vec::new());
        }
        if self.evictable(class) < need {
            return None;
        }
        self.choose(need, class, protected)
    }

    fn coldest(&mut self, class: Class) -> Option<u64> {
        let first = self
            .next_victims(1, class, &|_| false)
            .and_then(|mut chosen| chosen.pop())?;
        self.node(first.0).map(Node::tick)
    }

    fn now(&self) -> u64 {
        self.tick
    }

    fn visited(&self) -> u64 {
        self.visited
    }

    fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        self.containers.coldest(class, most)
    }

    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool {
        let Some((slot, pinned)) = self.containers.find(container) else {
            return true;
        };
        if pinned {
            return false;
        }
        let first = victims.len();
        for (number, node) in (0..).zip(self.nodes.iter()) {
            if node.state != State::Absent && node.container == slot {
                victims.push(EntryId(number));
            }
        }
        for entry in victims.get(first..).unwrap_or_default() {
            self.remove(*entry);
        }
        true
    }

    fn len(&self) -> usize {
        self.length
    }

    fn memory_bytes(&self) -> usize {
        let late: usize = self.classes.iter().map(|order| order.late.len()).sum();
        self.nodes.memory_bytes()
            + self.chunks.memory_bytes()
            + late * size_of::<(u64, u32)>()
            + self.containers.memory_bytes()
    }
}
