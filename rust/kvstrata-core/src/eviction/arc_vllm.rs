//! ARC as vLLM 0.33 has it: victim for victim what its `ARCCachePolicy`
//! (`v1/kv_offload/cpu/policies/arc.py`) evicts when it is told the same.
//!
//! It differs from the ARC of Megiddo and Modha (FAST 2003): a key that was evicted and comes back
//! enters the list of keys used once. 36 bytes per entry, up to 28 per key of the two lists of
//! ghosts, each of which is at most as long as the cache is large.

use super::ghosts::Ghosts;
use super::request::{EndedKey, RequestId, Tag};
use super::two_lists::{TwoLists, Which};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

/// Mark of an entry whose request has not ended yet.
const FRESH: u8 = 1;

/// The policy; see the module. One target serves all classes.
#[derive(Debug, Default)]
pub struct ArcVllm {
    entries: TwoLists,
    once: Ghosts,
    often: Ghosts,
    /// How many entries the list of those used once may have.
    target: f64,
    capacity: Option<usize>,
    entries_max: usize,
    visited: u64,
}

impl ArcVllm {
    /// A policy without entries. Until a capacity is set it is the most entries so far.
    pub fn new() -> Self {
        Self::default()
    }

    fn capacity(&self) -> usize {
        self.capacity.unwrap_or(self.entries_max)
    }

    fn adapt(&mut self, tag: Tag) {
        let (once, often) = (float(self.once.len()), float(self.often.len()));
        if self.once.renew(tag) {
            let most = float(self.capacity());
            self.target = (self.target + (often / once).max(1.0)).min(most);
        } else if self.often.renew(tag) {
            self.target = (self.target - (once / often).max(1.0)).max(0.0);
        }
    }

    fn use_again(&mut self, entry: EntryId) {
        self.entries.ledger.accessed(entry);
        if let Some(node) = self.entries.node_mut(entry) {
            node.mark = 0;
        }
        self.entries.move_to(entry, Which::Second);
    }

    /// Makes an entry the latest of its list: storing it is no use of it.
    fn renew(&mut self, entry: EntryId) {
        let Some(node) = self.entries.node_mut(entry) else {
            return;
        };
        node.mark = 0;
        let which = node.which;
        self.entries.ledger.accessed(entry);
        self.entries.move_to(entry, which);
    }

    /// The next entry from `from` on that may go.
    fn next(
        &mut self,
        from: &mut Option<EntryId>,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<EntryId> {
        while let Some(entry) = *from {
            *from = self.entries.warmer(entry);
            self.visited = self.visited.saturating_add(1);
            if self.entries.ledger.is_evictable(entry) && !protected(entry) {
                return Some(entry);
            }
        }
        None
    }
}

impl EvictionPolicy for ArcVllm {
    fn name(&self) -> &'static str {
        "arc_vllm"
    }

    fn set_capacity(&mut self, entries: usize) {
        self.capacity = Some(entries);
    }

    fn observe(&mut self, _arrival: &super::request::Arrival<'_>, _resident: &[EntryId]) {
        // vLLM's class counts a request when it ends.
    }

    fn finish(&mut self, _id: RequestId, _output_tokens: Option<u32>, resident: &[EntryId]) {
        for entry in resident.iter().rev() {
            match self.entries.node(*entry).map(|node| node.mark) {
                Some(FRESH) => self.renew(*entry),
                Some(_) => self.use_again(*entry),
                None => {}
            }
        }
    }

    fn ended(&mut self, _class: Class, keys: &[EndedKey]) {
        for key in keys.iter().rev() {
            let Some(entry) = key.entry else {
                continue;
            };
            if key.used {
                self.use_again(entry);
            } else if key.stored {
                self.renew(entry);
            }
        }
    }

    fn missed(&mut self, tags: &[Tag]) {
        for tag in tags.iter().rev() {
            self.adapt(*tag);
        }
    }

    fn insert(&mut self, entry: EntryId, tag: Tag, placement: Placement) {
        self.remove(entry);
        if !self.entries.insert(entry, tag, placement, Which::First) {
            return;
        }
        if let Some(node) = self.entries.node_mut(entry) {
            node.mark = FRESH;
        }
        self.entries_max = self.entries_max.max(self.entries.ledger.len());
        self.once.remove(tag);
        self.often.remove(tag);
    }

    fn access(&mut self, entry: EntryId) {
        let written = self
            .entries
            .node(entry)
            .is_some_and(|node| node.mark == FRESH)
            && !self.entries.ledger.is_evictable(entry);
        if written {
            self.renew(entry);
            // Not used yet, whoever touches it next.
            if let Some(node) = self.entries.node_mut(entry) {
                node.mark = FRESH;
            }
        } else {
            self.use_again(entry);
        }
    }

    fn remove(&mut self, entry: EntryId) {
        self.entries.remove(entry);
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
        let Some(chosen) = self.next_victims(need, class, protected) else {
            return false;
        };
        for entry in &chosen {
            self.evicted(*entry);
        }
        victims.extend(chosen);
        let most = self.capacity();
        self.once.trim(most);
        self.often.trim(most);
        true
    }

    fn evicted(&mut self, entry: EntryId) {
        if let Some(node) = self.entries.remove(entry) {
            match node.which {
                Which::First => self.once.insert(node.tag),
                Which::Second => self.often.insert(node.tag),
            }
            let most = self.capacity();
            self.once.trim(most);
            self.often.trim(most);
        }
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
        let mut left = self.entries.length(class, Which::First);
        let mut first = self.entries.coldest(class, Which::First);
        let mut second = self.entries.coldest(class, Which::Second);
        for _ in 0..need {
            let over = float(left) >= self.target.floor();
            let early = if over {
                self.next(&mut first, protected)
            } else {
                None
            };
            let victim = if let Some(entry) = early {
                left = left.saturating_sub(1);
                entry
            } else if let Some(entry) = self.next(&mut second, protected) {
                entry
            } else {
                left = left.saturating_sub(1);
                self.next(&mut first, protected)?
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
        self.entries.memory_bytes() + self.once.memory_bytes() + self.often.memory_bytes()
    }
}

#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "counts")]
const fn float(count: usize) -> f64 {
    count as f64
}
