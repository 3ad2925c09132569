//! The CPU tier: which key's row is in which slot of the arena, and which rows go when space is
//! needed. It moves no bytes: workers copy between GPU and slots, lower tiers between slots and
//! their devices, and both tell it when they begin and end.
//!
//! A row is *writing* from [`CpuTier::prepare_store`] until its writer is done, then *ready*. Rows
//! in use (written or read, by a worker or by a lower tier) are pinned. An entry that is no longer
//! *listed* (a reset, a load given up) is not found any more and keeps its slot until its last user
//! is done, for that user's machine may still write there.
//!
//! Rows of equal size are one class of the eviction policy, and a slab is its container. When a
//! class needs space it takes, in this order, free slots, empty slabs, and then what was used
//! longest ago: rows of its own, or a whole slab of another class whose last access is older than
//! that of its own next victim (`cpu/space.rs`). A class without rows that may go always takes a slab.
//!
//! The semantics are those of vLLM's `CPUOffloadingManager` (`vllm/v1/kv_offload/cpu/manager.py`).
//! Pure: no clock, no files, no threads; its caller holds one lock around it.

mod awaited;
mod entries;
mod options;
mod path;
mod pins;
mod requests;
mod space;
mod stats;
mod store;

use crate::error::Result;
use crate::eviction::admission::Admission;
use crate::eviction::{EntryId, EvictionPolicy};
use crate::key::{GroupId, Key};
use crate::slots::Slots;
use awaited::Awaited;
pub use entries::Handle;
use entries::{Entries, Entry};
pub use options::CpuOptions;
pub use pins::Pinned;
pub use requests::Asker;
use requests::Requests;
use stats::Counters;

/// What a lookup finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No row.
    Absent,
    /// A row that is being written.
    Writing,
    /// A row that can be loaded.
    Ready,
}

/// Who uses a slot. Workers' uses end at [`CpuTier::flushed`] too, after a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// A worker of the engine.
    Worker,
    /// A tier below.
    Tier,
}

/// A slot in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Names the use when it ends.
    pub handle: Handle,
    /// First byte of the slot in the arena.
    pub offset: u64,
}

/// What [`CpuTier::prepare_store`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Positions of the keys to store, in the order given.
    pub positions: Vec<usize>,
    /// The slot of each of them.
    pub places: Vec<Place>,
    /// Keys whose rows made room.
    pub evicted: Vec<Key>,
}

/// The tier; see the module.
#[derive(Debug)]
pub struct CpuTier {
    options: CpuOptions,
    slots: Slots,
    entries: Entries,
    policy: Box<dyn EvictionPolicy>,
    admission: Admission,
    counters: Counters,
    requests: Requests,
    awaited: Awaited,
    /// Whether the policy may leave rows of a worker out that are worth less than those they displace.
    bypasses: bool,
}

impl CpuTier {
    /// A tier without rows.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::error::ErrorKind::Config) for an unknown policy, and for an
    /// arena or row sizes that [`Slots::new`] refuses.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let sizes: Vec<u64> = options.row_bytes.iter().map(|(_, bytes)| *bytes).collect();
        let slots = Slots::new(options.arena_bytes, options.align, &sizes)?;
        let policy = crate::eviction::create_with(&options.policy, options.directory)?;
        let admission = Admission::new(options.admission, policy.predicts());
        let groups = options.row_bytes.len();
        Ok(Self {
            options,
            slots,
            entries: Entries::default(),
            policy,
            admission,
            counters: Counters::new(groups),
            requests: Requests::default(),
            awaited: Awaited::default(),
            bypasses: true,
        })
    }

    /// How the arena is cut and who has its slots.
    pub const fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The groups, in the order of their row sizes.
    pub fn groups(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.options.row_bytes.iter().map(|(group, _)| *group)
    }

    /// For each key, what there is. Counts as no access and pins nothing.
    pub fn lookup(&mut self, keys: &[Key]) -> Vec<Presence> {
        let found: Vec<Presence> = keys.iter().map(|key| self.presence(key)).collect();
        self.counters.looked_up(&found);
        found
    }

    fn presence(&self, key: &Key) -> Presence {
        match self.entries.find(key) {
            None => Presence::Absent,
            Some((_, entry)) if entry.writing => Presence::Writing,
            Some(_) => Presence::Ready,
        }
    }

    /// Ends stores of a worker: the rows become ready, or go. Positions of the keys that became
    /// ready; keys without a row being written by a worker are ignored.
    pub fn complete_store(&mut self, keys: &[Key], success: bool) -> Vec<usize> {
        let mut ready = Vec::new();
        for (position, key) in keys.iter().enumerate() {
            let Some((id, entry)) = self.entries.find(key) else {
                continue;
            };
            if entry.writing && entry.worker > 0 && self.written(id, User::Worker, success) {
                ready.push(position);
            }
        }
        ready
    }

    /// Pins the rows of all keys for a worker and counts one access. `None`, and nothing is pinned,
    /// unless all are ready.
    pub fn prepare_load(&mut self, keys: &[Key]) -> Option<Vec<Place>> {
        self.prepare_load_for(Asker::NOBODY, keys)
    }

    /// The same for a request, which accesses each row once.
    pub fn prepare_load_for(&mut self, asker: Asker<'_>, keys: &[Key]) -> Option<Vec<Place>> {
        let found: Option<Vec<(usize, EntryId)>> = keys
            .iter()
            .enumerate()
            .map(|(position, key)| {
                let (id, entry) = self.entries.find(key)?;
                (!entry.writing).then_some((position, id))
            })
            .collect();
        let found = found?;
        self.access(keys, &found, asker);
        let places = found
            .iter()
            .filter_map(|(_, id)| self.hold(*id, User::Worker))
            .collect();
        self.counters.loaded_keys += u64::try_from(keys.len()).unwrap_or(0);
        Some(places)
    }

    /// Takes one pin of a worker from each key's row.
    pub fn complete_load(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some((id, entry)) = self.entries.find(key)
                && !entry.writing
                && entry.worker > 0
            {
                self.release(id, User::Worker);
            }
        }
    }

    /// Pins those rows that are ready for a tier below, to read them: `None` for the others.
    pub fn hold_ready(&mut self, keys: &[Key]) -> Vec<Option<Place>> {
        keys.iter()
            .map(|key| {
                let (id, entry) = self.entries.find(key)?;
                if entry.writing {
                    return None;
                }
                self.hold(id, User::Tier)
            })
            .collect()
    }

    /// Ends uses of a tier below. A row that it was writing becomes ready where `success`, else it
    /// goes. Handles that name no use are ignored.
    pub fn let_go(&mut self, handles: &[Handle], success: bool) {
        for handle in handles {
            self.end_use(*handle, success);
        }
    }

    /// Ends one use; whether a row became ready by it.
    pub fn end_use(&mut self, handle: Handle, success: bool) -> bool {
        match self.entries.held(handle) {
            Some((id, entry)) if entry.tier > 0 && entry.writing => {
                self.written(id, User::Tier, success)
            }
            Some((id, entry)) if entry.tier > 0 => {
                self.release(id, User::Tier);
                false
            }
            _ => false,
        }
    }

    /// Makes rows that a tier below is writing absent at once. Their slots stay taken until
    /// [`CpuTier::let_go`].
    pub fn abandon(&mut self, handles: &[Handle]) {
        for handle in handles {
            if let Some((id, entry)) = self.entries.held(*handle)
                && entry.writing
                && entry.listed
            {
                self.policy.remove(id);
                self.unlist(id);
            }
        }
    }

    /// Forgets those rows of `keys` that are ready and not in use; which of them were.
    pub fn forget(&mut self, keys: &[Key]) -> Vec<Key> {
        let mut forgotten = Vec::new();
        for key in keys {
            if let Some((id, entry)) = self.entries.find(key)
                && entry.is_idle()
            {
                self.policy.remove(id);
                self.unlist(id);
                self.free_if_unused(id);
                forgotten.push(*key);
            }
        }
        forgotten
    }

    /// Forgets every row. Slots in use stay taken until their users are done: tiers below say so
    /// one by one, workers all at once ([`CpuTier::flushed`]).
    pub fn reset(&mut self) {
        for id in self.entries.listed() {
            self.policy.remove(id);
            self.unlist(id);
            self.free_if_unused(id);
        }
        self.requests.clear_rows();
        self.counters.resets += 1;
    }

    /// The workers are done with all they were doing at the last reset.
    pub fn flushed(&mut self) {
        for id in self.entries.unlisted() {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.worker = 0;
            }
            self.free_if_unused(id);
        }
    }

    fn hold(&mut self, id: EntryId, user: User) -> Option<Place> {
        let handle = self.entries.handle(id)?;
        let entry = self.entries.get_mut(id)?;
        let offset = self.slots.offset(entry.slot)?;
        match user {
            User::Worker => entry.worker = entry.worker.saturating_add(1),
            User::Tier => entry.tier = entry.tier.saturating_add(1),
        }
        self.policy.pin(id);
        Some(Place { handle, offset })
    }

    /// Takes one use away.
    fn release(&mut self, id: EntryId, user: User) {
        if let Some(entry) = self.entries.get_mut(id) {
            match user {
                User::Worker => entry.worker = entry.worker.saturating_sub(1),
                User::Tier => entry.tier = entry.tier.saturating_sub(1),
            }
            if entry.listed {
                self.policy.unpin(id);
            }
        }
        self.free_if_unused(id);
    }

    /// Ends the writing of a row; whether it is ready now.
    fn written(&mut self, id: EntryId, user: User, success: bool) -> bool {
        let Some(entry) = self.entries.get_mut(id) else {
            return false;
        };
        entry.writing = false;
        let ready = success && entry.listed;
        self.counters.writing = self.counters.writing.saturating_sub(1);
        if !success {
            self.policy.remove(id);
            self.unlist(id);
        }
        self.release(id, user);
        ready
    }

    /// Gives back the slot of an entry that is neither listed nor in use.
    fn free_if_unused(&mut self, id: EntryId) {
        let Some(entry) = self.entries.get(id) else {
            return;
        };
        if entry.listed || entry.worker > 0 || entry.tier > 0 {
            return;
        }
        let (slot, group) = (entry.slot, entry.key.group());
        if entry.writing {
            self.counters.writing = self.counters.writing.saturating_sub(1);
        }
        self.slots.release(slot);
        self.entries.remove(id);
        if let Some(at) = self.options.position(group) {
            self.counters.remove_row(at);
        }
    }
}
