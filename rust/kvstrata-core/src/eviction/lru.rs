//! Least recently used.
//!
//! One order per class (`order`), of nodes that are numbered by handle: 16 bytes per entry
//! ([`ENTRY_BYTES`]) and 8 to 16 in the order, every change in constant time.
//!
//! Pinned entries keep their places, so that an unpin costs nothing. The first eviction that meets a
//! pinned entry at the cold end *parks* it: it leaves the order, so later evictions do not meet it
//! again. When a parked entry is unpinned it goes to the class's *late* map, ordered by tick, from
//! which evictions take as from the order. Rows in use are seldom cold, so the late map is almost
//! always empty.

mod fill;
mod walk;

use std::collections::BTreeMap;

use super::containers::{Containers, Slot};
use super::order::{Entries, Order, Place};
use super::request::{EndedKey, Tag};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};
use crate::chunked::Chunked;
use crate::sys::prefetch::prefetch;

/// Bytes of memory per entry, besides its place in the order, parked entries and containers.
pub const ENTRY_BYTES: usize = 16;
const _: () = assert!(size_of::<Node>() == ENTRY_BYTES);

/// Entries of a request that are asked for before the first of them is looked at.
const AHEAD: usize = 64;

/// So many pins are not counted any more: the entry stays pinned for good.
const PINS_LOST: u16 = u16::MAX;

/// Where a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
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
struct Node {
    tick: u64,
    container: Slot,
    pins: u16,
    state: State,
}

impl Node {
    const ABSENT: Self = Self {
        tick: 0,
        container: Slot::MAX,
        pins: 0,
        state: State::Absent,
    };

    /// Its place in the order.
    const fn place(&self, number: u32) -> Place {
        #[expect(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            reason = "of the places of one entry, no two are 2^32 accesses apart"
        )]
        let stamp = self.tick as u32;
        Place { number, stamp }
    }
}

impl Entries for Chunked<Node> {
    fn is_current(&self, place: Place) -> bool {
        let node = self.get(place.number);
        node.is_some_and(|node| (node.state == State::Listed) & (node.place(place.number) == place))
    }

    fn prefetch(&self, place: Place) {
        prefetch(self.get(place.number));
    }
}

#[derive(Debug, Default)]
struct ClassOrder {
    order: Order,
    late: BTreeMap<u64, u32>,
    entries: usize,
    evictable: usize,
}

/// The policy; see the module.
#[derive(Debug, Default)]
pub struct Lru {
    nodes: Chunked<Node>,
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

    fn class(&self, class: Class) -> Option<&ClassOrder> {
        self.classes.get(usize::from(class.0))
    }

    /// The class of a container's entries.
    fn class_of(&mut self, container: Slot) -> Option<&mut ClassOrder> {
        let class = self.containers.class(container)?;
        self.classes.get_mut(usize::from(class.0))
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
        if let Some(own) = self.classes.get_mut(class) {
            own.entries += 1;
            own.evictable += 1;
        }
    }

    /// Puts a node at the warm end with a new tick.
    fn renew(&mut self, number: u32) {
        let next = self.tick.saturating_add(1);
        let Some(node) = self.nodes.get_mut(number) else {
            return;
        };
        let before = *node;
        if before.state == State::Absent {
            return;
        }
        node.tick = next;
        node.state = State::Listed;
        let place = node.place(number);
        self.tick = next;
        self.containers.accessed(before.container, next);
        let class = self.containers.class(before.container);
        if let Some(own) = class.and_then(|class| self.classes.get_mut(usize::from(class.0))) {
            if before.state == State::Late {
                own.late.remove(&before.tick);
            }
            own.order.push(place, own.entries, &self.nodes);
        }
    }

    /// How many rows at the end of `head_first` are the latest ones of all, in the right order.
    fn latest(&self, head_first: &[EntryId]) -> usize {
        let mut tick = None;
        let in_order = head_first.iter().rev().take_while(|entry| {
            let node = self
                .node(entry.0)
                .filter(|node| node.state == State::Listed);
            let own = node.map(|node| node.tick);
            let follows = own.is_some() && (tick.is_none() || tick.map(|tick| tick + 1) == own);
            tick = if follows { own } else { tick };
            follows
        });
        let count = in_order.count();
        if tick == Some(self.tick) { count } else { 0 }
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn ended(&mut self, _class: Class, keys: &[EndedKey]) {
        let entries: Vec<EntryId> = keys.iter().filter_map(|key| key.entry).collect();
        self.access_request(&entries);
    }

    fn insert(&mut self, entry: EntryId, _tag: Tag, placement: Placement) {
        self.remove(entry);
        self.place(entry, placement, State::Listed);
        self.renew(entry.0);
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
        for entry in head_first.iter().rev().take(AHEAD) {
            prefetch(self.nodes.get(entry.0));
        }
        let latest = self.latest(head_first);
        for entry in head_first.iter().rev().skip(latest) {
            self.renew(entry.0);
        }
    }

    fn remove(&mut self, entry: EntryId) {
        let Some(node) = self.node(entry.0).copied() else {
            return;
        };
        if let Some(own) = self.class_of(node.container) {
            own.entries = own.entries.saturating_sub(1);
            if node.pins == 0 {
                own.evictable = own.evictable.saturating_sub(1);
            }
            if node.state == State::Late {
                own.late.remove(&node.tick);
            }
            if own.entries == 0 {
                own.order = Order::default();
            }
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
        let before = *node;
        node.pins = before.pins.saturating_add(1);
        if before.state == State::Late {
            node.state = State::Parked;
        }
        if before.pins > 0 {
            return;
        }
        self.containers.pinned(before.container);
        if let Some(own) = self.class_of(before.container) {
            own.evictable = own.evictable.saturating_sub(1);
            if before.state == State::Late {
                own.late.remove(&before.tick);
            }
        }
    }

    fn unpin(&mut self, entry: EntryId) {
        let Some(node) = self.node_mut(entry.0) else {
            return;
        };
        if node.pins == 0 || node.pins == PINS_LOST {
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
        if let Some(own) = self.class_of(container) {
            own.evictable += 1;
            if returns {
                own.late.insert(tick, entry.0);
            }
        }
    }

    fn evictable(&self, class: Class) -> usize {
        self.class(class).map_or(0, |own| own.evictable)
    }

    fn evict(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> bool {
        let walk = self.walk(need, class, protected);
        let enough = walk.chosen.len() == need;
        if enough {
            self.forget(class, &walk.chosen);
            victims.extend_from_slice(&walk.chosen);
        }
        self.put_back(class, walk.passed);
        enough
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        let walk = self.walk(need, class, protected);
        self.put_back(class, walk.passed);
        (walk.chosen.len() == need).then_some(walk.chosen)
    }

    fn coldest(&mut self, class: Class) -> Option<u64> {
        let first = self
            .next_victims(1, class, &|_| false)
            .and_then(|mut chosen| chosen.pop())?;
        self.node(first.0).map(|node| node.tick)
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
        let of =
            |own: &ClassOrder| own.order.memory_bytes() + own.late.len() * size_of::<(u64, u32)>();
        let orders: usize = self.classes.iter().map(of).sum();
        self.nodes.memory_bytes() + orders + self.containers.memory_bytes()
    }
}
