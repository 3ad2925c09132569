//! A cache of a size under a policy, as the simulator sees it.

use crate::eviction::admission::{Admission, AdmissionOptions};
use crate::eviction::request::{Arrival, Context, EndedKey, RequestId, Tag};
use crate::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

use super::trace::tag;

const PLACEMENT: Placement = Placement {
    class: Class(0),
    container: ContainerId(0),
};
const ABSENT: u32 = u32::MAX;

/// What happened to a level so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Blocks written to it.
    pub written: u64,
    /// Blocks evicted from it.
    pub evicted: u64,
    /// Blocks it was offered and did not take.
    pub refused: u64,
}

/// A cache; see the module.
#[derive(Debug)]
pub struct Level {
    policy: Box<dyn EvictionPolicy>,
    capacity: usize,
    admission: Admission,
    /// Whether it is told of requests only when they end, as vLLM's managers tell.
    told_late: bool,
    /// By block: its entry.
    entries: Vec<u32>,
    /// By entry: its block.
    blocks: Vec<u32>,
    free: Vec<u32>,
    /// What happened to it.
    pub traffic: Traffic,
    tags: Vec<Tag>,
    /// Of a late request: which of its blocks were there.
    hits: Vec<bool>,
}

impl Level {
    /// An empty cache of `capacity` blocks that takes what these options say.
    pub fn new(
        mut policy: Box<dyn EvictionPolicy>,
        capacity: usize,
        unique: u32,
        admission: AdmissionOptions,
    ) -> Self {
        policy.set_capacity(capacity);
        let admission = Admission::new(admission, policy.predicts());
        Self {
            policy,
            capacity,
            admission,
            told_late: false,
            entries: vec![ABSENT; usize::try_from(unique).unwrap_or(0)],
            blocks: Vec::new(),
            free: Vec::new(),
            traffic: Traffic::default(),
            tags: Vec::new(),
            hits: Vec::new(),
        }
    }

    /// The same, told of requests only when they end, and of nothing but their keys.
    #[must_use]
    pub fn told_late(mut self) -> Self {
        self.told_late = true;
        self
    }

    /// The policy.
    pub fn policy(&self) -> &dyn EvictionPolicy {
        self.policy.as_ref()
    }

    /// Whether a block is there.
    pub fn has(&self, block: u32) -> bool {
        self.entry(block).is_some()
    }

    fn entry(&self, block: u32) -> Option<EntryId> {
        let at = usize::try_from(block).ok()?;
        let entry = *self.entries.get(at)?;
        (entry != ABSENT).then_some(EntryId(entry))
    }

    fn set_entry(&mut self, block: u32, entry: u32) {
        let at = usize::try_from(block).ok();
        if let Some(place) = at.and_then(|at| self.entries.get_mut(at)) {
            *place = entry;
        }
    }

    fn resident(&self, path: &[u32]) -> Vec<EntryId> {
        let found = path.iter().filter_map(|block| self.entry(*block));
        found.collect()
    }

    /// A request arrives.
    pub fn arrive(&mut self, id: RequestId, milliseconds: u64, path: &[u32], context: Context) {
        self.policy.set_time(milliseconds);
        self.admission.set_time(milliseconds);
        if self.told_late {
            self.hits = path.iter().map(|block| self.has(*block)).collect();
            return;
        }
        let resident = self.resident(path);
        self.tags.clear();
        self.tags.extend(path.iter().map(|block| tag(*block)));
        let arrival = Arrival {
            id,
            class: PLACEMENT.class,
            tags: &self.tags,
            context,
        };
        self.policy.observe(&arrival, &resident);
        if !self.admission.takes_all() {
            self.admission.observe(&arrival);
        }
    }

    /// Stores what is not there of a path, of which the first `hits` blocks were loaded before. As
    /// in vLLM, what is offered to be stored and is there stays; what was loaded has been used just
    /// now and may go for all else.
    pub fn store(&mut self, path: &[u32], hits: usize) {
        let mut missing: Vec<u32> = path
            .iter()
            .copied()
            .filter(|block| !self.has(*block))
            .collect();
        let offered = missing.len();
        if !self.admission.takes_all() {
            let (policy, admission) = (self.policy.as_ref(), &mut self.admission);
            admission.offered(missing.iter().map(|block| tag(*block)));
            missing.retain(|block| admission.admits(tag(*block), Some(policy)));
        }
        if missing.is_empty() {
            self.traffic.refused += count(offered);
            return;
        }
        let tags: Vec<Tag> = missing.iter().map(|block| tag(*block)).collect();
        self.policy.missed(&tags);
        let room = self.capacity.saturating_sub(self.policy.len());
        let need = missing.len().saturating_sub(room);
        let own = self.resident(path);
        let most = self.policy.len().saturating_sub(own.len());
        let mut evicted = need.min(most);
        if evicted > 0
            && let Some(first) = tags.first()
        {
            let offered = own.iter().skip(hits).copied();
            let own: hashbrown::HashSet<EntryId> = offered.collect();
            let protected = |entry: EntryId| own.contains(&entry);
            let mut victims = Vec::with_capacity(evicted);
            let tag = if self.told_late { Tag(0) } else { *first };
            evicted =
                self.policy
                    .evict_for(tag, evicted, PLACEMENT.class, &protected, &mut victims);
            for victim in victims {
                self.vacate(victim);
            }
        }
        missing.truncate(room.saturating_add(evicted));
        self.traffic.evicted += count(evicted);
        self.traffic.written += count(missing.len());
        self.traffic.refused += count(offered.saturating_sub(missing.len()));
        for block in missing.into_iter().rev() {
            let entry = self.occupy(block);
            self.policy.insert(EntryId(entry), tag(block), PLACEMENT);
        }
    }

    /// A request ends.
    pub fn finish(&mut self, id: RequestId, output_tokens: Option<u32>, path: &[u32]) {
        if self.told_late {
            let keys: Vec<EndedKey> = path
                .iter()
                .zip(&self.hits)
                .map(|(block, used)| EndedKey {
                    tag: tag(*block),
                    entry: self.entry(*block),
                    stored: !*used,
                    used: *used,
                })
                .collect();
            self.policy.ended(PLACEMENT.class, &keys);
            return;
        }
        let resident = self.resident(path);
        self.policy.finish(id, output_tokens, &resident);
    }

    fn vacate(&mut self, entry: EntryId) {
        let at = usize::try_from(entry.0).ok();
        if let Some(block) = at.and_then(|at| self.blocks.get(at)).copied() {
            self.set_entry(block, ABSENT);
            self.free.push(entry.0);
        }
    }

    fn occupy(&mut self, block: u32) -> u32 {
        let entry = if let Some(entry) = self.free.pop() {
            let at = usize::try_from(entry).ok();
            if let Some(place) = at.and_then(|at| self.blocks.get_mut(at)) {
                *place = block;
            }
            entry
        } else {
            self.blocks.push(block);
            u32::try_from(self.blocks.len() - 1).unwrap_or(ABSENT)
        };
        self.set_entry(block, entry);
        entry
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
