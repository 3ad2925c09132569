//! Entries in two lists per class, with what every policy has to know of them.

use super::ledger::{Ledger, Record};
use super::order::{Entries, Order, Place};
use super::request::Tag;
use super::{Class, ContainerId, EntryId, Placement};
use crate::chunked::Chunked;

/// One of the two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// Where entries come in.
    First,
    /// Where those go that were used again.
    Second,
}

impl Which {
    const fn number(self) -> u8 {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }

    const fn of(number: u8) -> Self {
        match number {
            0 => Self::First,
            _ => Self::Second,
        }
    }
}

#[derive(Debug, Default)]
struct List {
    order: Order,
    length: usize,
}

/// What a search for victims came upon.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Entries that may go, in the order in which they go.
    pub(super) chosen: Vec<EntryId>,
    /// Places that were taken out of each list, coldest first.
    passed: [Vec<Place>; 2],
}

/// The entries: 20 bytes each, and 8 to 16 in their list.
///
/// Of the ledger's numbers of an entry, `node` is the stamp of its place, `list` which list it is
/// in, and `mark` its uses, or any other small number of the policy.
#[derive(Debug, Default)]
pub(super) struct TwoLists {
    pub(super) ledger: Ledger,
    tags: Chunked<Tag>,
    pairs: Vec<[List; 2]>,
    stamp: u32,
    pub(super) visited: u64,
}

impl Entries for Ledger {
    fn is_current(&self, place: Place) -> bool {
        let record = self.get(EntryId(place.number));
        record.is_some_and(|record| record.node == place.stamp)
    }

    fn prefetch(&self, place: Place) {
        self.prefetch(EntryId(place.number));
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
        if !self.ledger.insert(entry, 0, placement) {
            return false;
        }
        while usize::try_from(entry.0).is_ok_and(|at| self.tags.len() <= at) {
            self.tags.push(tag);
        }
        if let Some(place) = self.tags.get_mut(entry.0) {
            *place = tag;
        }
        let class = usize::from(placement.class.0);
        if self.pairs.len() <= class {
            self.pairs.resize_with(class + 1, Default::default);
        }
        self.push(entry, placement.class, which);
        true
    }

    fn list_mut(&mut self, class: Class, which: Which) -> Option<&mut List> {
        let pair = self.pairs.get_mut(usize::from(class.0))?;
        pair.get_mut(usize::from(which.number()))
    }

    fn push(&mut self, entry: EntryId, class: Class, which: Which) {
        self.stamp = self.stamp.wrapping_add(1);
        let stamp = self.stamp;
        if let Some(record) = self.ledger.get_mut(entry) {
            record.node = stamp;
            record.list = which.number();
        }
        let pair = self.pairs.get_mut(usize::from(class.0));
        if let Some(list) = pair.and_then(|pair| pair.get_mut(usize::from(which.number()))) {
            list.length += 1;
            let place = Place {
                number: entry.0,
                stamp,
            };
            list.order.push(place, list.length, &self.ledger);
        }
    }

    fn leave(&mut self, class: Class, which: Which) {
        if let Some(list) = self.list_mut(class, which) {
            list.length = list.length.saturating_sub(1);
            if list.length == 0 {
                list.order = Order::default();
            }
        }
    }

    /// Puts an entry at the warm end of a list.
    pub(super) fn move_to(&mut self, entry: EntryId, which: Which) {
        let before = self.which(entry);
        if let Some(class) = self.ledger.class(entry)
            && let Some(before) = before
        {
            self.leave(class, before);
            self.push(entry, class, which);
        }
    }

    /// Forgets an entry; returns its key and where it was.
    pub(super) fn remove(&mut self, entry: EntryId) -> Option<(Tag, Which)> {
        let (class, which) = (self.ledger.class(entry)?, self.which(entry)?);
        self.ledger.remove(entry)?;
        self.leave(class, which);
        Some((self.tag(entry)?, which))
    }

    /// The key that an entry has, or had last.
    pub(super) fn tag(&self, entry: EntryId) -> Option<Tag> {
        self.tags.get(entry.0).copied()
    }

    /// Which list an entry is in.
    pub(super) fn which(&self, entry: EntryId) -> Option<Which> {
        let record = self.ledger.get(entry)?;
        Some(Which::of(record.list))
    }

    /// The policy's small number of an entry.
    pub(super) fn mark(&self, entry: EntryId) -> Option<u8> {
        self.ledger.get(entry).map(|record| record.mark)
    }

    /// The same, to change it.
    pub(super) fn mark_mut(&mut self, entry: EntryId) -> Option<&mut u8> {
        let record: &mut Record = self.ledger.get_mut(entry)?;
        Some(&mut record.mark)
    }

    /// Notes an access to an entry; returns the policy's small number of it, to change it.
    pub(super) fn accessed(&mut self, entry: EntryId) -> Option<&mut u8> {
        let record = self.ledger.accessed(entry)?;
        Some(&mut record.mark)
    }

    /// Number of entries in a list.
    pub(super) fn length(&self, class: Class, which: Which) -> usize {
        let pair = self.pairs.get(usize::from(class.0));
        let list = pair.and_then(|pair| pair.get(usize::from(which.number())));
        list.map_or(0, |list| list.length)
    }

    /// Begins a search for victims of a class. What it comes upon is to be put back.
    pub(super) fn walk(&mut self, class: Class, need: usize) -> Walk {
        for list in self
            .pairs
            .get_mut(usize::from(class.0))
            .into_iter()
            .flatten()
        {
            list.order.look_again();
        }
        Walk {
            chosen: Vec::with_capacity(need),
            passed: Default::default(),
        }
    }

    /// The coldest entry of a list that the search has not come upon yet.
    pub(super) fn next(&mut self, class: Class, which: Which) -> Option<Place> {
        self.visited = self.visited.saturating_add(1);
        let pair = self.pairs.get_mut(usize::from(class.0))?;
        let list = pair.get_mut(usize::from(which.number()))?;
        list.order.pop(&self.ledger)
    }

    /// The next entry of a list that may go.
    pub(super) fn next_free(
        &mut self,
        class: Class,
        which: Which,
        protected: &dyn Fn(EntryId) -> bool,
        walk: &mut Walk,
    ) -> Option<EntryId> {
        while let Some(place) = self.next(class, which) {
            if self.is_free(place, which, protected, walk) {
                return Some(EntryId(place.number));
            }
        }
        None
    }

    /// Whether an entry that the search came upon may go; it keeps its place until it does.
    pub(super) fn is_free(
        &self,
        place: Place,
        which: Which,
        protected: &dyn Fn(EntryId) -> bool,
        walk: &mut Walk,
    ) -> bool {
        if let Some(passed) = walk.passed.get_mut(usize::from(which.number())) {
            passed.push(place);
        }
        let entry = EntryId(place.number);
        self.ledger.is_evictable(entry) && !protected(entry)
    }

    /// Ends a search: what it came upon and is still there has its place again.
    pub(super) fn put_back(&mut self, class: Class, walk: Walk) -> Vec<EntryId> {
        let lists = self
            .pairs
            .get_mut(usize::from(class.0))
            .into_iter()
            .flatten();
        for (list, passed) in lists.zip(walk.passed) {
            for place in passed.into_iter().rev() {
                if self.ledger.is_current(place) {
                    list.order.put_back(place);
                }
            }
        }
        walk.chosen
    }

    /// See [`EvictionPolicy::remove_container`](super::EvictionPolicy::remove_container).
    pub(super) fn remove_container(
        &mut self,
        container: ContainerId,
        victims: &mut Vec<EntryId>,
    ) -> bool {
        let Some(own) = self.ledger.unpinned_entries_of(container) else {
            return false;
        };
        for entry in &own {
            self.remove(*entry);
        }
        victims.extend(own);
        true
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        let lists = self.pairs.iter().flatten();
        let orders: usize = lists.map(|list| list.order.memory_bytes()).sum();
        self.ledger.memory_bytes() + self.tags.memory_bytes() + orders
    }
}
