//! Entries in two lists per class, with what every policy has to know of them.

use super::ledger::Ledger;
use super::links::{Links, List, NONE, Nodes};
use super::request::Tag;
use super::{Class, EntryId, Placement};
use crate::chunked::Chunked;

/// One of the two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// Where entries come in.
    First,
    /// Where those go that were used again.
    Second,
}

/// An entry: 24 bytes, and 12 in the ledger.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) tag: Tag,
    links: Links,
    class: Class,
    pub(super) which: Which,
    /// Uses, or any other small number of the policy.
    pub(super) mark: u8,
}

impl Nodes for Chunked<Node> {
    fn links(&mut self, number: u32) -> Option<&mut Links> {
        self.get_mut(number).map(|node| &mut node.links)
    }
}

/// The lists of a class and how many entries they have.
#[derive(Clone, Copy, Debug)]
struct Pair {
    lists: [List; 2],
    lengths: [usize; 2],
}

/// The entries; see the module.
#[derive(Debug, Default)]
pub(super) struct TwoLists {
    pub(super) ledger: Ledger,
    nodes: Chunked<Node>,
    pairs: Vec<Pair>,
}

const fn at(which: Which) -> usize {
    match which {
        Which::First => 0,
        Which::Second => 1,
    }
}

impl TwoLists {
    /// Adds a new entry at the warm end of a list; false for a handle that cannot be one.
    pub(super) fn insert(
        &mut self,
        entry: EntryId,
        tag: Tag,
        placement: Placement,
        which: Which,
    ) -> bool {
        if !self.ledger.insert(entry, entry.0, placement) {
            return false;
        }
        let node = Node {
            tag,
            links: Links::unlinked(),
            class: placement.class,
            which,
            mark: 0,
        };
        while usize::try_from(entry.0).is_ok_and(|at| self.nodes.len() <= at) {
            self.nodes.push(node);
        }
        if let Some(place) = self.nodes.get_mut(entry.0) {
            *place = node;
        }
        self.push(entry.0);
        true
    }

    fn pair(&mut self, class: Class) -> Option<&mut Pair> {
        let number = usize::from(class.0);
        if self.pairs.len() <= number {
            let empty = Pair {
                lists: [List::new(); 2],
                lengths: [0; 2],
            };
            self.pairs.resize(number + 1, empty);
        }
        self.pairs.get_mut(number)
    }

    fn push(&mut self, number: u32) {
        let Some(node) = self.nodes.get(number).copied() else {
            return;
        };
        self.pair(node.class);
        let pair = self.pairs.get_mut(usize::from(node.class.0));
        if let Some(pair) = pair
            && let Some(list) = pair.lists.get_mut(at(node.which))
            && let Some(length) = pair.lengths.get_mut(at(node.which))
        {
            list.push_warmest(&mut self.nodes, number);
            *length += 1;
        }
    }

    fn unlink(&mut self, number: u32) {
        let Some(node) = self.nodes.get(number).copied() else {
            return;
        };
        let pair = self.pairs.get_mut(usize::from(node.class.0));
        if let Some(pair) = pair
            && let Some(list) = pair.lists.get_mut(at(node.which))
            && let Some(length) = pair.lengths.get_mut(at(node.which))
        {
            list.unlink(&mut self.nodes, number);
            *length = length.saturating_sub(1);
        }
    }

    /// Puts an entry at the warm end of a list.
    pub(super) fn move_to(&mut self, entry: EntryId, which: Which) {
        if self.ledger.node(entry).is_none() {
            return;
        }
        self.unlink(entry.0);
        if let Some(node) = self.nodes.get_mut(entry.0) {
            node.which = which;
        }
        self.push(entry.0);
    }

    /// Forgets an entry; returns what it was.
    pub(super) fn remove(&mut self, entry: EntryId) -> Option<Node> {
        self.ledger.remove(entry)?;
        self.unlink(entry.0);
        self.nodes.get(entry.0).copied()
    }

    /// An entry.
    pub(super) fn node(&self, entry: EntryId) -> Option<&Node> {
        self.ledger.node(entry)?;
        self.nodes.get(entry.0)
    }

    /// An entry, to change its mark.
    pub(super) fn node_mut(&mut self, entry: EntryId) -> Option<&mut Node> {
        self.ledger.node(entry)?;
        self.nodes.get_mut(entry.0)
    }

    /// Number of entries in a list.
    pub(super) fn length(&self, class: Class, which: Which) -> usize {
        let pair = self.pairs.get(usize::from(class.0));
        pair.and_then(|pair| pair.lengths.get(at(which)).copied())
            .unwrap_or(0)
    }

    /// The entry at the cold end of a list.
    pub(super) fn coldest(&self, class: Class, which: Which) -> Option<EntryId> {
        let pair = self.pairs.get(usize::from(class.0))?;
        let first = pair.lists.get(at(which))?.coldest();
        (first != NONE).then_some(EntryId(first))
    }

    /// The entry after another, on its warm side.
    pub(super) fn warmer(&self, entry: EntryId) -> Option<EntryId> {
        let next = self.nodes.get(entry.0)?.links.warmer();
        (next != NONE).then_some(EntryId(next))
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.ledger.memory_bytes() + self.nodes.memory_bytes()
    }
}
