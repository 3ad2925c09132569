//! S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, SOSP 2023): a small queue that keeps what is used once
//! out of the main one, and ghosts of what it let go.
//!
//! 25 to 30 bytes per entry and 16 to 32 per ghost, of which there are as many as entries.
//! Rows in use are passed where they stand.

use super::recent::Recent;
use super::request::Tag;
use super::two_lists::{TwoLists, Walk, Which};
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
    ghosts: Recent,
}

impl S3Fifo {
    /// A policy without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Next victim of a queue. What was used goes from the small one to the main one, and round the
    /// main one once more.
    fn next(
        &mut self,
        class: Class,
        which: Which,
        protected: &dyn Fn(EntryId) -> bool,
        walk: &mut Walk,
    ) -> Option<EntryId> {
        let uses_min = match which {
            Which::First => USES_PROMOTE,
            Which::Second => 1,
        };
        while let Some(entry) = self.entries.next(class, which, walk) {
            let uses = self.entries.mark(entry);
            if let Some(uses) = uses.filter(|uses| *uses >= uses_min) {
                let left = match which {
                    Which::First => 0,
                    Which::Second => uses - 1,
                };
                self.entries.set_mark(entry, left);
                self.entries.move_in_walk(entry, Which::Second);
            } else if self.entries.is_free(entry, protected) {
                return Some(entry);
            }
        }
        None
    }

    /// Finds victims; `None` if there are not as many.
    fn search(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        if self.evictable(class) < need {
            return None;
        }
        let mut walk = TwoLists::walk(need);
        let mut from_small = 0;
        while walk.chosen.len() < need {
            let in_small = self.entries.length(class, Which::First) - from_small;
            let all = in_small + self.entries.length(class, Which::Second);
            let first = if in_small * SMALL_SHARE >= all {
                Which::First
            } else {
                Which::Second
            };
            // What the small queue gives the main one last is looked at, too.
            let order = [first, Which::Second, Which::First, Which::Second];
            let found = order.into_iter().find_map(|which| {
                let entry = self.next(class, which, protected, &mut walk);
                entry.map(|entry| (entry, which))
            });
            let Some((victim, which)) = found else {
                self.entries.end(class);
                return None;
            };
            if which == Which::First {
                from_small += 1;
                if let Some(tag) = self.entries.tag(victim) {
                    self.ghosts.prefetch(tag);
                }
            }
            walk.chosen.push(victim);
        }
        self.entries.end(class);
        Some(walk.chosen)
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

    fn missed(&mut self, tags: &[Tag]) {
        for tag in tags {
            self.ghosts.prefetch(*tag);
        }
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
        if let Some(record) = self.entries.accessed(entry) {
            record.set_mark((record.mark() + 1).min(USES_MAX));
        }
    }

    fn access_request(&mut self, head_first: &[EntryId]) {
        self.entries.prefetch(head_first);
        for entry in head_first.iter().rev() {
            self.access(*entry);
        }
    }

    fn remove(&mut self, entry: EntryId) {
        self.entries.remove(entry);
    }

    fn evicted(&mut self, entry: EntryId) {
        if let Some((tag, Which::First)) = self.entries.remove(entry) {
            self.ghosts.insert(tag);
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

    fn evict(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> bool {
        let Some(chosen) = self.search(need, class, protected) else {
            return false;
        };
        self.ghosts.keep(self.entries.ledger.len());
        let ghosts = &mut self.ghosts;
        self.entries.forget(class, &chosen, |tag, which| {
            if which == Which::First {
                ghosts.insert(tag);
            }
        });
        victims.extend(chosen);
        true
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        let chosen = self.search(need, class, protected)?;
        self.ghosts.keep(self.entries.ledger.len());
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
        self.entries.visited
    }

    fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        self.entries.ledger.coldest_containers(class, most)
    }

    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool {
        self.entries.remove_container(container, victims)
    }

    fn len(&self) -> usize {
        self.entries.ledger.len()
    }

    fn memory_bytes(&self) -> usize {
        self.entries.memory_bytes() + self.ghosts.memory_bytes()
    }
}
