//! ARC as vLLM 0.33 has it: victim for victim what its `ARCCachePolicy`
//! (`v1/kv_offload/cpu/policies/arc.py`) evicts when it is told the same.
//!
//! It differs from the ARC of Megiddo and Modha (FAST 2003): a key that was evicted and comes back
//! enters the list of keys used once. 25 to 30 bytes per entry, up to 28 per key of the two lists
//! of ghosts, each of which is at most as long as the cache is large.

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
        if let Some(record) = self.entries.accessed(entry) {
            record.set_mark(0);
        }
        self.entries.move_to(entry, Which::Second);
    }

    /// Makes an entry the latest of its list: storing it is no use of it.
    fn renew(&mut self, entry: EntryId) {
        let Some(record) = self.entries.accessed(entry) else {
            return;
        };
        record.set_mark(0);
        if let Some(which) = self.entries.which(entry) {
            self.entries.move_to(entry, which);
        }
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
        let mut left = self.entries.length(class, Which::First);
        for _ in 0..need {
            let order = if float(left) >= self.target.floor() {
                [Which::First, Which::Second]
            } else {
                [Which::Second, Which::First]
            };
            let found = order.into_iter().find_map(|which| {
                let entry = self.entries.next_free(class, which, protected, &mut walk);
                entry.map(|entry| (entry, which))
            });
            let Some((victim, which)) = found else {
                self.entries.end(class);
                return None;
            };
            if which == Which::First {
                left = left.saturating_sub(1);
            }
            walk.chosen.push(victim);
        }
        self.entries.end(class);
        Some(walk.chosen)
    }

    /// Forgets an entry, but for its key.
    fn bury(&mut self, entry: EntryId) {
        match self.entries.remove(entry) {
            Some((tag, Which::First)) => self.once.insert(tag),
            Some((tag, Which::Second)) => self.often.insert(tag),
            None => {}
        }
    }

    fn trim(&mut self) {
        let most = self.capacity();
        self.once.trim(most);
        self.often.trim(most);
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
        self.entries.prefetch(resident);
        for entry in resident.iter().rev() {
            match self.entries.mark(*entry) {
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
        for tag in tags {
            self.once.prefetch(*tag);
            self.often.prefetch(*tag);
        }
        for tag in tags.iter().rev() {
            self.adapt(*tag);
        }
    }

    fn insert(&mut self, entry: EntryId, tag: Tag, placement: Placement) {
        self.remove(entry);
        if !self.entries.insert(entry, tag, placement, Which::First) {
            return;
        }
        self.entries.set_mark(entry, FRESH);
        self.entries_max = self.entries_max.max(self.entries.ledger.len());
        self.once.remove(tag);
        self.often.remove(tag);
    }

    fn access(&mut self, entry: EntryId) {
        let fresh = self.entries.mark(entry) == Some(FRESH);
        if fresh && !self.entries.ledger.is_evictable(entry) {
            self.renew(entry);
            // Not used yet, whoever touches it next.
            self.entries.set_mark(entry, FRESH);
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
        let Some(chosen) = self.search(need, class, protected) else {
            return false;
        };
        for tag in chosen.iter().filter_map(|entry| self.entries.tag(*entry)) {
            self.once.prefetch(tag);
            self.often.prefetch(tag);
        }
        let (once, often) = (&mut self.once, &mut self.often);
        self.entries
            .forget(class, &chosen, |tag, which| match which {
                Which::First => once.insert(tag),
                Which::Second => often.insert(tag),
            });
        victims.extend(chosen);
        self.trim();
        true
    }

    fn evicted(&mut self, entry: EntryId) {
        self.bury(entry);
        self.trim();
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        self.search(need, class, protected)
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
        self.entries.memory_bytes() + self.once.memory_bytes() + self.often.memory_bytes()
    }
}

#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "counts")]
const fn float(count: usize) -> f64 {
    count as f64
}
