//! Entries in two lists per class, with what every policy has to know of them.

use super::ledger::{Ledger, Record};
use super::order::{Chunks, Entries, Order, Place, Walk as OrderWalk};
use super::request::Tag;
use super::{Class, ContainerId, EntryId, Placement};
use crate::chunked::{Chunked, LARGE_BITS};
use crate::sys::prefetch::prefetch;

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

    const fn of(record: Record) -> Self {
        if record.is_in_second() {
            Self::Second
        } else {
            Self::First
        }
    }
}

/// A search for victims.
#[derive(Debug)]
pub(super) struct Walk {
    /// Entries that may go, in the order in which they go.
    pub(super) chosen: Vec<EntryId>,
    /// How far it is in each list.
    lists: [OrderWalk; 2],
}

/// The entries: 16 bytes each, and 5 to 10 in their list.
///
/// Of the ledger's numbers of an entry, `node` is its place, and the mark its uses, or any other
/// small number of the policy.
#[derive(Debug, Default)]
pub(super) struct TwoLists {
    pub(super) ledger: Ledger,
    tags: Chunked<Tag, LARGE_BITS>,
    chunks: Chunks,
    pairs: Vec<[Order; 2]>,
    pub(super) visited: u64,
}

impl Entries for Ledger {
    fn moved(&mut self, number: u32, place: Place) {
        if let Some(record) = self.get_mut(EntryId(number)) {
            record.node = place.number();
        }
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
        self.tidy(placement.class);
        true
    }

    fn push(&mut self, entry: EntryId, class: Class, which: Which) {
        let pair = self.pairs.get_mut(usize::from(class.0));
        let order = pair.and_then(|pair| pair.get_mut(usize::from(which.number())));
        if let Some(order) = order
            && let Some(record) = self.ledger.get_mut(entry)
        {
            record.node = self.chunks.push_warmest(order, entry.0).number();
            record.set_in_second(which == Which::Second);
        }
    }

    fn leave(&mut self, class: Class, record: Record) {
        let which = Which::of(record);
        let pair = self.pairs.get_mut(usize::from(class.0));
        if let Some(order) = pair.and_then(|pair| pair.get_mut(usize::from(which.number()))) {
            self.chunks.remove(order, Place::of(record.node));
        }
    }

    /// Looks for room that is not used; no walk is under way.
    fn tidy(&mut self, class: Class) {
        for order in self
            .pairs
            .get_mut(usize::from(class.0))
            .into_iter()
            .flatten()
        {
            self.chunks.tidy(order, &mut self.ledger);
        }
    }

    /// Puts an entry at the warm end of a list.
    pub(super) fn move_to(&mut self, entry: EntryId, which: Which) {
        self.move_in_walk(entry, which);
        if let Some(class) = self.ledger.class(entry) {
            self.tidy(class);
        }
    }

    /// The same for an entry that a walk came upon.
    pub(super) fn move_in_walk(&mut self, entry: EntryId, which: Which) {
        if let Some(record) = self.ledger.get(entry).copied()
            && let Some(class) = self.ledger.class(entry)
        {
            self.leave(class, record);
            self.push(entry, class, which);
        }
    }

    /// Forgets an entry; returns its key and where it was.
    pub(super) fn remove(&mut self, entry: EntryId) -> Option<(Tag, Which)> {
        let (class, record) = (self.ledger.class(entry)?, *self.ledger.get(entry)?);
        self.ledger.remove(entry)?;
        self.leave(class, record);
        Some((self.tag(entry)?, Which::of(record)))
    }

    /// Forgets victims of a class; `gone` is told the key of each and where it was.
    pub(super) fn forget(
        &mut self,
        class: Class,
        victims: &[EntryId],
        mut gone: impl FnMut(Tag, Which),
    ) {
        let Some(pair) = self.pairs.get_mut(usize::from(class.0)) else {
            return;
        };
        let (tags, chunks) = (&self.tags, &mut self.chunks);
        self.ledger.forget(class, victims, |entry, record| {
            let which = Which::of(record);
            if let Some(order) = pair.get_mut(usize::from(which.number())) {
                chunks.remove(order, Place::of(record.node));
            }
            if let Some(tag) = tags.get(entry.0) {
                gone(*tag, which);
            }
        });
    }

    /// Fetches entries of a request: they will be looked at soon.
    pub(super) fn prefetch(&self, entries: &[EntryId]) {
        for entry in entries {
            self.ledger.prefetch(*entry);
        }
    }

    /// The key that an entry has, or had last.
    pub(super) fn tag(&self, entry: EntryId) -> Option<Tag> {
        self.tags.get(entry.0).copied()
    }

    /// Which list an entry is in.
    pub(super) fn which(&self, entry: EntryId) -> Option<Which> {
        self.ledger.get(entry).map(|record| Which::of(*record))
    }

    /// The policy's small number of an entry.
    pub(super) fn mark(&self, entry: EntryId) -> Option<u8> {
        self.ledger.get(entry).map(|record| record.mark())
    }

    /// The same, to change it.
    pub(super) fn set_mark(&mut self, entry: EntryId, mark: u8) {
        if let Some(record) = self.ledger.get_mut(entry) {
            record.set_mark(mark);
        }
    }

    /// Notes an access to an entry; returns it.
    pub(super) fn accessed(&mut self, entry: EntryId) -> Option<&mut Record> {
        self.ledger.accessed(entry)
    }

    /// Number of entries in a list.
    pub(super) fn length(&self, class: Class, which: Which) -> usize {
        let pair = self.pairs.get(usize::from(class.0));
        let order = pair.and_then(|pair| pair.get(usize::from(which.number())));
        order.map_or(0, Order::len)
    }

    /// Begins a search for victims; [`TwoLists::end`] ends it. Each entry is come upon once, and once
    /// more for each time that it is moved to a warm end meanwhile.
    pub(super) fn walk(need: usize) -> Walk {
        Walk {
            chosen: Vec::with_capacity(need),
            lists: [OrderWalk::new(); 2],
        }
    }

    /// The coldest entry of a list that the search has not come upon yet.
    pub(super) fn next(&mut self, class: Class, which: Which, walk: &mut Walk) -> Option<EntryId> {
        self.visited = self.visited.saturating_add(1);
        let at = usize::from(which.number());
        let order = self.pairs.get_mut(usize::from(class.0))?.get_mut(at)?;
        let (ledger, tags) = (&self.ledger, &self.tags);
        let ask = |number| {
            ledger.prefetch(EntryId(number));
            prefetch(tags.get(number));
        };
        let found = self.chunks.next(order, walk.lists.get_mut(at)?, &ask);
        found.map(EntryId)
    }

    /// The next entry of a list that may go.
    pub(super) fn next_free(
        &mut self,
        class: Class,
        which: Which,
        protected: &dyn Fn(EntryId) -> bool,
        walk: &mut Walk,
    ) -> Option<EntryId> {
        while let Some(entry) = self.next(class, which, walk) {
            if self.is_free(entry, protected) {
                return Some(entry);
            }
        }
        None
    }

    /// Whether an entry may go.
    pub(super) fn is_free(&self, entry: EntryId, protected: &dyn Fn(EntryId) -> bool) -> bool {
        self.ledger.is_evictable(entry) && !protected(entry)
    }

    /// Ends a search for victims of a class.
    pub(super) fn end(&mut self, class: Class) {
        for order in self
            .pairs
            .get_mut(usize::from(class.0))
            .into_iter()
            .flatten()
        {
            self.chunks.end(order);
        }
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
        self.ledger.memory_bytes() + self.tags.memory_bytes() + self.chunks.memory_bytes()
    }
}
