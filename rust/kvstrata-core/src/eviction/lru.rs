//! Least recently used.
//!
//! One list per class, coldest first, threaded through a vector that is indexed by handle:
//! 24 bytes per entry ([`ENTRY_BYTES`]), every change in constant time.
//!
//! Pinned entries stay where they are in the list, so that an unpin costs nothing and keeps the
//! order. The first eviction that meets a pinned entry at the cold end *parks* it: it leaves the
//! list, so later evictions do not meet it again. When a parked entry is unpinned it goes to the
//! class's *late* map, ordered by tick, from which evictions take as from the list. Rows in use
//! are seldom cold, so the late map is almost always empty.

use std::collections::BTreeMap;

use super::containers::{Containers, Slot};
use super::links::{Linked, Links, List, NONE};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

/// Bytes of memory per entry, besides parked entries and containers.
pub const ENTRY_BYTES: usize = 24;
const _: () = assert!(size_of::<Node>() == ENTRY_BYTES);

/// Where a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The handle is unused.
    Absent,
    /// In the class's list, pinned or not.
    Listed,
    /// Pinned and out of the list.
    Parked,
    /// Unpinned, in the class's late map.
    Late,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    tick: u64,
    links: Links,
    container: Slot,
    pins: u16,
    state: State,
}

impl Node {
    const ABSENT: Self = Self {
        tick: 0,
        links: Links::unlinked(),
        container: NONE,
        pins: 0,
        state: State::Absent,
    };
}

impl Linked for Node {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

#[derive(Debug)]
struct ClassOrder {
    list: List,
    late: BTreeMap<u64, u32>,
    evictable: usize,
}

/// The policy; see the module.
#[derive(Debug, Default)]
pub struct Lru {
    nodes: Vec<Node>,
    classes: Vec<ClassOrder>,
    containers: Containers,
    tick: u64,
    length: usize,
}

impl Lru {
    /// A policy without entries.
    pub fn new() -> Self {
        Self::default()
    }

    fn node(&self, number: u32) -> Option<&Node> {
        let node = usize::try_from(number)
            .ok()
            .and_then(|index| self.nodes.get(index))?;
        (node.state != State::Absent).then_some(node)
    }

    fn node_mut(&mut self, number: u32) -> Option<&mut Node> {
        let node = usize::try_from(number)
            .ok()
            .and_then(|index| self.nodes.get_mut(index))?;
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

    /// Takes a node out of the list or the late map, whichever it is in.
    fn detach(&mut self, number: u32) {
        let Some(node) = self.node(number).copied() else {
            return;
        };
        let Some(class) = self.containers.class(node.container) else {
            return;
        };
        let Some(order) = self.classes.get_mut(usize::from(class.0)) else {
            return;
        };
        match node.state {
            State::Listed => order.list.unlink(&mut self.nodes, number),
            State::Late => {
                order.late.remove(&node.tick);
            }
            State::Parked | State::Absent => {}
        }
    }

    /// Puts a detached node at the warm end with a new tick.
    fn attach_warmest(&mut self, number: u32) {
        let tick = self.next_tick();
        let Some(node) = self.node_mut(number) else {
            return;
        };
        node.tick = tick;
        node.state = State::Listed;
        let container = node.container;
        self.containers.accessed(container, tick);
        let Some(class) = self.containers.class(container) else {
            return;
        };
        if let Some(order) = self.classes.get_mut(usize::from(class.0)) {
            order.list.push_warmest(&mut self.nodes, number);
        }
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

    /// The coldest `need` entries that may go, or None; parks the pinned entries it meets.
    fn choose(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<u32>> {
        let mut chosen = Vec::with_capacity(need);
        let mut parked = Vec::new();
        let order = self.order(class)?;
        let mut late = order.late.iter().peekable();
        let mut listed = order.list.coldest();
        while chosen.len() < need {
            let candidate = match (late.peek().map(|(tick, _)| **tick), self.node(listed)) {
                (Some(late_tick), Some(node)) if node.tick < late_tick => listed,
                (None, Some(_)) => listed,
                (Some(_), _) => late.next().map_or(NONE, |(_, number)| *number),
                (None, None) => break,
            };
            if candidate == listed {
                let Some(node) = self.node(listed) else { break };
                listed = node.links.warmer();
                if node.pins > 0 {
                    parked.push(candidate);
                    continue;
                }
            }
            if !protected(EntryId(candidate)) {
                chosen.push(candidate);
            }
        }
        let enough = chosen.len() == need;
        for number in parked {
            self.detach(number);
            if let Some(node) = self.node_mut(number) {
                node.state = State::Parked;
            }
        }
        enough.then_some(chosen)
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, entry: EntryId, placement: Placement) {
        self.remove(entry);
        let Ok(index) = usize::try_from(entry.0) else {
            return;
        };
        if entry.0 == NONE {
            return;
        }
        if index >= self.nodes.len() {
            self.nodes.resize(index + 1, Node::ABSENT);
        }
        while self.classes.len() <= usize::from(placement.class.0) {
            let order = ClassOrder {
                list: List::new(),
                late: BTreeMap::new(),
                evictable: 0,
            };
            self.classes.push(order);
        }
        let container = self.containers.enter(placement);
        if let Some(node) = self.nodes.get_mut(index) {
            *node = Node {
                container,
                state: State::Listed,
                ..Node::ABSENT
            };
        }
        self.length += 1;
        self.change_evictable(container, true);
        self.attach_warmest(entry.0);
    }

    fn access(&mut self, entry: EntryId) {
        self.detach(entry.0);
        self.attach_warmest(entry.0);
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
        let Some(node) = self.node(entry.0).copied() else {
            return;
        };
        if node.state == State::Late {
            self.detach(entry.0);
        }
        if let Some(node) = self.node_mut(entry.0) {
            debug_assert!(node.pins < u16::MAX, "pins are counted in 16 bits");
            node.pins = node.pins.saturating_add(1);
            if node.state == State::Late {
                node.state = State::Parked;
            }
        }
        if node.pins == 0 {
            self.containers.pinned(node.container);
            self.change_evictable(node.container, false);
        }
    }

    fn unpin(&mut self, entry: EntryId) {
        let Some(node) = self.node_mut(entry.0) else {
            return;
        };
        if node.pins == 0 {
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
        let (tick, container) = (node.tick, node.container);
        self.containers.unpinned(container);
        self.change_evictable(container, true);
        if let Some(class) = self.containers.class(container).filter(|_| returns)
            && let Some(order) = self.order_mut(class)
        {
            order.late.insert(tick, entry.0);
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
        if need == 0 {
            return true;
        }
        if self.evictable(class) < need {
            return false;
        }
        let Some(chosen) = self.choose(need, class, protected) else {
            return false;
        };
        for number in chosen {
            self.remove(EntryId(number));
            victims.push(EntryId(number));
        }
        true
    }

    fn coldest(&self, class: Class) -> Option<u64> {
        let order = self.order(class)?;
        let late = order.late.first_key_value().map(|(tick, _)| *tick);
        let mut listed = self.node(order.list.coldest());
        while let Some(node) = listed.filter(|node| node.pins > 0) {
            listed = self.node(node.links.warmer());
        }
        match (late, listed.map(|node| node.tick)) {
            (Some(late), Some(listed)) => Some(late.min(listed)),
            (late, listed) => late.or(listed),
        }
    }

    fn coldest_container(&self, class: Class) -> Option<(ContainerId, u64)> {
        self.containers.coldest(class)
    }

    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool {
        let Some((slot, pinned)) = self.containers.find(container) else {
            return true;
        };
        if pinned {
            return false;
        }
        let first = victims.len();
        for (index, node) in self.nodes.iter().enumerate() {
            if node.state != State::Absent && node.container == slot {
                victims.extend(u32::try_from(index).map(EntryId));
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
        self.nodes.capacity() * ENTRY_BYTES
            + late * size_of::<(u64, u32)>()
            + self.containers.memory_bytes()
    }
}
