//! Single rows, for a manager that asks key by key.

use super::{CpuTier, Handle};
use crate::key::Key;

/// What [`CpuTier::pin_ready`] finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// No row.
    Absent,
    /// A row that is being written.
    Writing(Handle),
    /// A row that can be loaded, which has one more use by a tier below now.
    Ready(Handle),
}

impl CpuTier {
    /// Looks a key up and pins its row where it is ready: [`CpuTier::let_go`] ends that.
    pub fn pin_ready(&mut self, key: &Key) -> Pinned {
        self.counters.lookups += 1;
        let Some((handle, id, entry)) = self.entries.find_mut(key) else {
            return Pinned::Absent;
        };
        self.counters.lookup_hits += 1;
        if entry.writing {
            return Pinned::Writing(handle);
        }
        entry.tier = entry.tier.saturating_add(1);
        self.policy.pin(id);
        Pinned::Ready(handle)
    }

    /// Adds a use by a tier below to a row that lookups find and that is ready; whether it did.
    pub fn hold_more(&mut self, handle: Handle) -> bool {
        let Some((id, entry)) = self.entries.held(handle) else {
            return false;
        };
        if entry.writing || !entry.listed {
            return false;
        }
        if let Some(entry) = self.entries.get_mut(id) {
            entry.tier = entry.tier.saturating_add(1);
        }
        self.policy.pin(id);
        true
    }

    /// Names the row that lookups find of a key.
    pub fn handle_of(&self, key: &Key) -> Option<Handle> {
        let (id, _) = self.entries.find(key)?;
        self.entries.handle(id)
    }

    /// The key of a row in use.
    pub fn key_of(&self, handle: Handle) -> Option<&Key> {
        self.entries.held(handle).map(|(_, entry)| &entry.key)
    }

    /// Bytes of the slot that a key's row takes; `None` for a group without a row size.
    pub fn slot_bytes(&self, key: &Key) -> Option<u64> {
        let geometry = self.slots.geometry();
        let class = geometry.class_of(self.options.position(key.group())?)?;
        geometry.stride(class)
    }

    /// Payload bytes of a key's row.
    pub fn row_bytes(&self, key: &Key) -> Option<u64> {
        let at = self.options.position(key.group())?;
        self.options.row_bytes.get(at).map(|(_, bytes)| *bytes)
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.slots.geometry().arena_bytes()
    }
}
