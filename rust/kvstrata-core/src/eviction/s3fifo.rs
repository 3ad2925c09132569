//! S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, SOSP 2023): a small queue that keeps what is used once
//! out of the main one, and ghosts of what it let go.
//!
//! 36 bytes per entry and up to 28 per ghost, of which there are as many as entries at most.
//! Rows in use are passed where they stand.

use super::ghosts::Ghosts;
use super::request::Tag;
use super::two_lists::{TwoLists, Which};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

/// The small queue's share of all entries: one in so many.
const SMALL_SHARE: usize = 10;
/// Uses are counted up to this.
const USES_MAX: u8 = 3;
/// Uses in the small queue that take an entry to the main one.
const USES_PROMOTE: u8 = 2;

/// The policy; see the module.
#[derive(Debug, Default)]
pub struct S3Fifo {
    entries: TwoLists,
    ghosts: Ghosts,
    visited: u64,
}

impl S3Fifo {
    /// A policy without entries.
    pub fn new() -> Self {
        Self::default()
    }

    fn may_go(&mut self, entry: EntryId, protected: &dyn Fn(EntryId) -> bool) -> bool {
        self.visited = self.visited.saturating_add(1);
        self.entries.ledger.is_evictable(entry) && !protected(entry)
    }

    fn uses(&self, entry: EntryId) -> u8 {
        self.entries.node(entry).map_or(0, |node| node.mark)
    }

    fn set_uses(&mut self, entry: EntryId, uses: u8) {
        if let Some(node) = self.entries.node_mut(entry) {
            node.mark = uses;
        }
    }

    /// Next victim of the small queue from `at` on; what was used there goes to the main one.
    fn next_small(
        &mut self,
        at: &mut Option<EntryId>,
        main: &mut Option<EntryId>,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<EntryId> {
        while let Some(entry) = *at {
            *at = self.entries.warmer(entry);
            if self.uses(entry) >= USES_PROMOTE {
                // Where the main queue was passed to its end, it goes on with this one.
                main.get_or_insert(entry);
                self.visited = self.visited.saturating_add(1);
                self.set_uses(entry, 0);
                self.entries.move_to(entry, Which::Second);
            } else if self.may_go(entry, protected) {
                return Some(entry);
            }
        }
        None
    }

    /// Next victim of the main queue from `at` on; what was used goes round once more.
    fn next_main(
        &mut self,
        at: &mut Option<EntryId>,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<EntryId> {
        while let Some(entry) = *at {
            let uses = self.uses(entry);
            if uses > 0 {
                self.visited = self.visited.saturating_add(1);
                self.set_uses(entry, uses - 1);
                let next = self.entries.warmer(entry);
                self.entries.move_to(entry, Which::Second);
                *at = next.or(Some(entry));
            } else {
                *at = self.entries.warmer(entry);
                if self.may_go(entry, protected) {
                    return Some(entry);
                }
            }
        }
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn finish(
        &mut self,
        _id: super::request::RequestId,
        _output_tokens: Option<u32>,
        _resident: &[EntryId],
    ) {
        // A request counts once, when it arrives.
    }

    fn insert(&mut self, entry: EntryId, tag: Tag, placement: Placement) {
        self.remove(entry);
        let which = if self.ghosts.remove(tag) {
            Which::Second
        } else {
            Which::First
        };
        self.entries.insert(entry, tag, placement, which);
    }

    fn access(&mut self, entry: EntryId) {
        self.entries.ledger.accessed(entry);
        if let Some(node) = self.entries.node_mut(entry) {
            node.mark = node.mark.saturating_add(1).min(USES_MAX);
        }
    }

    fn remove(&mut self, entry: EntryId) {
        self.entries.remove(entry);
    }

    fn evicted(&mut self, entry: EntryId) {
        if let Some(node) = self.entries.remove(entry)
            && node.which == Which::First
        {
            self.ghosts.insert(node.tag);
            self.ghosts.trim(self.entries.ledger.len().max(1));
        }
    }

    fn pin(&mut self, entry: EntryId) {
        self.entries.ledger.pin(entry);
    }

    fn unpin(&mut self, entry: EntryId) {
        self.entries.ledger.unpin(entry);
    }

    fn evictable(&self, class: Class) -> usize {
        self.entries.ledger.evictable(class)
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        if self.evictable(class) < need {
            return None;
        }
        let mut chosen = Vec::with_capacity(need);
        let mut small = self.entries.coldest(class, Which::First);
        let mut main = self.entries.coldest(class, Which::Second);
        let mut from_small = 0;
        while chosen.len() < need {
            let in_small = self.entries.length(class, Which::First) - from_small;
            let all = in_small + self.entries.length(class, Which::Second);
            let early = if in_small * SMALL_SHARE >= all {
                self.next_small(&mut small, &mut main, protected)
            } else {
                None
            };
            let victim = if let Some(entry) = early {
                from_small += 1;
                entry
            } else if let Some(entry) = self.next_main(&mut main, protected) {
                entry
            } else if let Some(entry) = self.next_small(&mut small, &mut main, protected) {
                from_small += 1;
                entry
            } else {
                // What the small queue has just given it.
                self.next_main(&mut main, protected)?
            };
            chosen.push(victim);
        }
        Some(chosen)
    }

    fn coldest(&mut self, class: Class) -> Option<u64> {
        let victim = self.next_victims(1, class, &|_| false)?.pop()?;
        self.entries.ledger.last_access(victim)
    }

    fn now(&self) -> u64 {
        self.entries.ledger.now()
    }

    fn visited(&self) -> u64 {
        self.visited
    }

    fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        self.entries.ledger.coldest_containers(class, most)
    }

    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool {
        let Some(own) = self.entries.ledger.unpinned_entries_of(container) else {
            return false;
        };
        for entry in &own {
            self.remove(*entry);
        }
        victims.extend(own);
        true
    }

    fn len(&self) -> usize {
        self.entries.ledger.len()
    }

    fn memory_bytes(&self) -> usize {
        self.entries.memory_bytes() + self.ghosts.memory_bytes()
    }
}
