//! The two paths that every policy has, one at a time: a request whose blocks are all there, and a
//! request that is new and needs the room of others.

#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use kvstrata_core::eviction::request::{Arrival, Context, RequestId, Tag};
use kvstrata_core::eviction::{EntryId, EvictionPolicy, create};
use kvstrata_core::simulate::trace::tag;

use crate::blocks::{ABSENT, PLACEMENT, at, number};

/// Blocks of a request.
pub const BLOCKS: u32 = 64;
/// Milliseconds from one request to the next.
const STEP: u64 = 100;

/// A full tier under a policy.
#[derive(Debug)]
pub struct Paths {
    policy: Box<dyn EvictionPolicy>,
    /// By entry: number of its block; a prompt has [`BLOCKS`] in a row.
    blocks: Vec<u32>,
    /// By block: its entry.
    entries: Vec<u32>,
    free: Vec<u32>,
    /// Prompts of which every block is there, and by prompt its place among them.
    whole: Vec<u32>,
    places: Vec<u32>,
    requests: u64,
    prompts: u32,
    random: u64,
    victims: Vec<EntryId>,
}

impl Paths {
    /// A tier of so many blocks that is full of prompts which came once.
    pub fn new(policy: &str, entries: usize) -> Self {
        let mut policy = create(policy).expect("a policy");
        policy.set_capacity(entries);
        let mut own = Self {
            policy,
            blocks: vec![ABSENT; entries],
            entries: Vec::new(),
            free: (0..number(entries)).rev().collect(),
            whole: Vec::new(),
            places: Vec::new(),
            requests: 0,
            prompts: 0,
            random: 1,
            victims: Vec::new(),
        };
        // Twice, so that what remembers ghosts has some.
        while at(own.prompts * BLOCKS) < 2 * entries {
            own.store();
            own.touch();
        }
        own
    }

    fn draw(&mut self, below: u32) -> u32 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        u32::try_from((self.random >> 33) % u64::from(below)).expect("small")
    }

    fn begin(&mut self, first: u32, resident: &[EntryId]) -> (RequestId, Vec<Tag>) {
        let tags: Vec<Tag> = (first..first + BLOCKS).map(tag).collect();
        self.requests += 1;
        self.policy.set_time(self.requests * STEP);
        let id = RequestId(self.requests);
        let arrival = Arrival {
            id,
            class: PLACEMENT.class,
            tags: &tags,
            context: Context {
                prompt_tokens: Some(BLOCKS * 16),
                ..Context::default()
            },
        };
        self.policy.observe(&arrival, resident);
        (id, tags)
    }

    /// A request for a prompt that is there.
    pub fn touch(&mut self) {
        let drawn = self.draw(number(self.whole.len()));
        let first = self.whole[at(drawn)] * BLOCKS;
        let own = &self.entries[at(first)..at(first + BLOCKS)];
        let resident: Vec<EntryId> = own.iter().map(|entry| EntryId(*entry)).collect();
        let (id, _) = self.begin(first, &resident);
        self.policy.finish(id, None, &resident);
    }

    /// A request for a prompt that never came, for which others have to go.
    pub fn store(&mut self) {
        let first = self.prompts * BLOCKS;
        self.prompts += 1;
        let (id, tags) = self.begin(first, &[]);
        self.policy.missed(&tags);
        let need = tags.len().saturating_sub(self.free.len());
        self.victims.clear();
        if need > 0 {
            let victims = &mut self.victims;
            let class = PLACEMENT.class;
            let is_done = self.policy.evict(need, class, &|_| false, victims);
            assert!(is_done, "nothing is pinned");
            for victim in &self.victims {
                let block = self.blocks[at(victim.0)];
                self.entries[at(block)] = ABSENT;
                self.free.push(victim.0);
                let place = core::mem::replace(&mut self.places[at(block / BLOCKS)], ABSENT);
                if place != ABSENT {
                    self.whole.swap_remove(at(place));
                    if let Some(moved) = self.whole.get(at(place)) {
                        self.places[at(*moved)] = place;
                    }
                }
            }
        }
        self.entries.resize(at(first + BLOCKS), ABSENT);
        let mut resident = Vec::with_capacity(tags.len());
        for (block, tag) in (first..first + BLOCKS).zip(&tags).rev() {
            let entry = self.free.pop().expect("room");
            self.entries[at(block)] = entry;
            self.blocks[at(entry)] = block;
            self.policy.insert(EntryId(entry), *tag, PLACEMENT);
            resident.push(EntryId(entry));
        }
        self.places.push(number(self.whole.len()));
        self.whole.push(first / BLOCKS);
        resident.reverse();
        self.policy.finish(id, None, &resident);
    }
}
