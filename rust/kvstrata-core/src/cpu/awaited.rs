//! Rows that waiting requests will need: they stay while others can go.
//!
//! Such rows are pinned, from the head of the prompt on, as far as their share of the arena allows:
//! those of a token that all groups end a chunk with stay all of them or none. A worker's store that
//! finds no room else takes it from the requests that came last; a load from below waits instead.

use std::collections::BTreeMap;

use super::{CpuTier, Handle};
use crate::eviction::EntryId;

/// Requests that wait, by number, and the rows that stay for each.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    rows: BTreeMap<u32, Vec<Handle>>,
    /// Bytes of the slots of these rows, each counted once.
    pub(super) bytes: u64,
}

impl Awaited {
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl CpuTier {
    /// A request waits to run: those of its rows that are there stay until [`CpuTier::runs`].
    pub fn waits(&mut self, request: u32) {
        if self.options.awaited_share == 0 || self.awaited.rows.contains_key(&request) {
            return;
        }
        let arena = u128::from(self.arena_bytes());
        let most = arena * u128::from(self.options.awaited_share) / 1000;
        let mut kept = Vec::new();
        for chunk in self
            .rows_by_end(request)
            .chunk_by(|one, other| one.0 == other.0)
        {
            let there = chunk.iter().filter_map(|(_, handle)| {
                let (id, entry) = self.entries.held(*handle).filter(|(_, one)| one.listed)?;
                let bytes = self.slot_bytes(&entry.key).unwrap_or(0);
                Some((*handle, id, if entry.awaited == 0 { bytes } else { 0 }))
            });
            let rows: Vec<(Handle, EntryId, u64)> = there.collect();
            let fresh: u64 = rows.iter().map(|(.., bytes)| bytes).sum();
            let all = self.awaited.bytes.saturating_add(fresh);
            if fresh > 0 && u128::from(all) > most {
                break;
            }
            self.awaited.bytes = all;
            for (handle, id, _) in rows {
                self.await_row(id);
                kept.push(handle);
            }
        }
        if !kept.is_empty() {
            self.awaited.rows.insert(request, kept);
        }
    }

    fn await_row(&mut self, id: EntryId) {
        let Some(entry) = self.entries.get_mut(id) else {
            return;
        };
        entry.awaited = entry.awaited.saturating_add(1);
        if entry.awaited == 1 {
            self.policy.pin(id);
        }
    }

    /// The rows that stay for waiting requests, each once.
    pub(super) fn awaited_rows(&self) -> Vec<EntryId> {
        let handles = self.awaited.rows.values().flatten();
        let there = handles.filter_map(|handle| self.entries.held(*handle));
        let mut rows: Vec<EntryId> = there
            .filter(|(_, entry)| entry.listed && entry.awaited > 0)
            .map(|(id, _)| id)
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// A request runs, or will not any more: its rows may go.
    pub fn runs(&mut self, request: u32) {
        let rows = self.awaited.rows.remove(&request);
        for handle in rows.into_iter().flatten() {
            let Some((id, entry)) = self.entries.held(handle).filter(|(_, one)| one.awaited > 0)
            else {
                continue;
            };
            let (is_last, is_listed) = (entry.awaited == 1, entry.listed);
            if let Some(entry) = self.entries.get_mut(id) {
                entry.awaited -= 1;
            }
            if is_last && is_listed {
                self.no_longer_awaited(id);
                self.policy.unpin(id);
            }
        }
    }

    /// Lets the rows of the request go that waits and came last; false where none waits.
    pub(crate) fn give_up_last(&mut self) -> bool {
        let Some(last) = self.awaited.rows.keys().next_back().copied() else {
            return false;
        };
        self.counters.unprotected_requests += 1;
        self.runs(last);
        true
    }

    /// Lets lookups find an entry no more.
    pub(super) fn unlist(&mut self, id: EntryId) {
        let is_awaited = |entry: &super::Entry| entry.listed && entry.awaited > 0;
        if self.entries.get(id).is_some_and(is_awaited) {
            self.no_longer_awaited(id);
        }
        self.entries.unlist(id);
    }

    fn no_longer_awaited(&mut self, id: EntryId) {
        let entry = self.entries.get(id);
        let bytes = entry.and_then(|entry| self.slot_bytes(&entry.key));
        self.awaited.bytes = self.awaited.bytes.saturating_sub(bytes.unwrap_or(0));
    }

    /// Requests for which rows stay, and the bytes of these rows' slots.
    pub fn awaited(&self) -> (usize, u64) {
        (self.awaited.rows.len(), self.awaited.bytes)
    }
}
