//! A queue without any policy: what driving one costs.

use std::collections::VecDeque;

use kvstrata_core::eviction::request::{Arrival, RequestId, Tag};
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

/// Its name.
pub(crate) const FIFO: &str = "fifo";

/// First in, first out.
#[derive(Debug, Default)]
pub(crate) struct Fifo(VecDeque<EntryId>);

impl EvictionPolicy for Fifo {
    fn name(&self) -> &'static str {
        FIFO
    }

    fn observe(&mut self, _arrival: &Arrival<'_>, _resident: &[EntryId]) {}

    fn finish(&mut self, _id: RequestId, _output_tokens: Option<u32>, _resident: &[EntryId]) {}

    fn insert(&mut self, entry: EntryId, _tag: Tag, _placement: Placement) {
        self.0.push_back(entry);
    }

    fn access(&mut self, _entry: EntryId) {}

    fn remove(&mut self, _entry: EntryId) {}

    fn pin(&mut self, _entry: EntryId) {}

    fn unpin(&mut self, _entry: EntryId) {}

    fn evictable(&self, _class: Class) -> usize {
        self.0.len()
    }

    fn evict(
        &mut self,
        need: usize,
        _class: Class,
        _protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> bool {
        if need > self.0.len() {
            return false;
        }
        victims.extend(self.0.drain(..need));
        true
    }

    fn next_victims(
        &mut self,
        need: usize,
        _class: Class,
        _protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        (need <= self.0.len()).then(|| self.0.iter().take(need).copied().collect())
    }

    fn coldest(&mut self, _class: Class) -> Option<u64> {
        None
    }

    fn now(&self) -> u64 {
        0
    }

    fn visited(&self) -> u64 {
        0
    }

    fn coldest_containers(&self, _class: Class, _most: usize) -> Vec<(ContainerId, u64)> {
        Vec::new()
    }

    fn remove_container(&mut self, _container: ContainerId, _victims: &mut Vec<EntryId>) -> bool {
        false
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<EntryId>()
    }
}
