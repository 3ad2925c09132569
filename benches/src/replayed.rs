//! Policies driven by real requests, without anything around them that costs more than they do.

#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use kvstrata_core::eviction::request::{Arrival, Context, RequestId, Tag};
use kvstrata_core::eviction::{EntryId, EvictionPolicy, create};

use crate::blocks::{ABSENT, PLACEMENT, at, number};
use crate::calls::{Call, Calls, Counts, Measured, take};
use crate::fifo::{FIFO, Fifo};
use crate::processor::processor;
use crate::workload::Workload;

/// Blocks of so many rounds are told apart.
const ROUNDS: u32 = 3;

/// A policy in the middle of a workload.
#[derive(Debug)]
pub struct Replayed<'a> {
    workload: &'a Workload,
    policy: Box<dyn EvictionPolicy>,
    capacity: usize,
    at: usize,
    round: u32,
    /// When the round began.
    from: u64,
    /// By block: its entry.
    entries: Vec<u32>,
    /// By entry: its block.
    holders: Vec<u32>,
    free: Vec<u32>,
    counts: Counts,
    blocks: Vec<u32>,
    tags: Vec<Tag>,
    resident: Vec<EntryId>,
    missing: Vec<usize>,
    missing_tags: Vec<Tag>,
    victims: Vec<EntryId>,
    /// Where calls are written down, if they are.
    calls: Option<Calls>,
}

impl<'a> Replayed<'a> {
    /// A policy that has seen nothing.
    pub fn new(policy: &str, entries: usize, workload: &'a Workload) -> Self {
        let mut policy = if policy == FIFO {
            Box::new(Fifo::default())
        } else {
            create(policy).expect("a policy")
        };
        policy.set_capacity(entries);
        Self {
            workload,
            policy,
            capacity: entries,
            at: 0,
            round: 0,
            from: 0,
            entries: vec![ABSENT; workload.unique * at(ROUNDS)],
            holders: vec![ABSENT; entries],
            free: (0..number(entries)).rev().collect(),
            counts: Counts::default(),
            blocks: Vec::new(),
            tags: Vec::new(),
            resident: Vec::new(),
            missing: Vec::new(),
            missing_tags: Vec::new(),
            victims: Vec::new(),
            calls: None,
        }
    }

    /// Replays so many more requests; when there are no more, the first ones again, with other
    /// blocks.
    pub fn run(&mut self, requests: usize) {
        for _ in 0..requests {
            self.request(self.at);
            self.at += 1;
            if self.at == self.workload.requests.len() {
                self.at = 0;
                self.round += 1;
                self.from += self.workload.span;
            }
        }
    }

    /// The round whose blocks this one has.
    const fn blocks_of(&self) -> u32 {
        if self.workload.is_repeated {
            0
        } else {
            self.round
        }
    }

    fn request(&mut self, id: usize) {
        let request = &self.workload.requests[id];
        let round = self.blocks_of();
        let base = round % ROUNDS * number(self.workload.unique);
        let blocks = &mut self.blocks;
        blocks.clear();
        let own = &self.workload.blocks[request.first..request.end];
        blocks.extend(own.iter().map(|block| block + base));
        let tags = &mut self.tags;
        tags.clear();
        let flip = u64::from(round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let own = &self.workload.tags[request.first..request.end];
        tags.extend(own.iter().map(|tag| Tag(tag.0 ^ flip)));
        self.resident.clear();
        self.missing.clear();
        self.missing_tags.clear();
        let mut prefix = 0;
        for (place, block) in blocks.iter().enumerate() {
            let entry = self.entries[at(*block)];
            if entry == ABSENT {
                self.missing.push(place);
                self.missing_tags.push(tags[place]);
            } else {
                prefix += u64::from(self.missing.is_empty());
                self.resident.push(EntryId(entry));
            }
        }
        self.counts.accesses += u64::try_from(blocks.len()).expect("small");
        self.counts.hits += prefix;
        self.policy.set_time(self.from + request.milliseconds);
        let arrival = Arrival {
            id: RequestId(u64::try_from(id).expect("small")),
            class: PLACEMENT.class,
            tags,
            context: Context {
                prompt_tokens: Some(request.prompt_tokens),
                ..Context::default()
            },
        };
        let arrival_id = arrival.id;
        self.policy.observe(&arrival, &self.resident);
        let need = self.missing.len().saturating_sub(self.free.len());
        let call = Call {
            id: arrival.id,
            milliseconds: self.from + request.milliseconds,
            prompt_tokens: request.prompt_tokens,
            tags: tags.len(),
            resident: self.resident.len(),
            missing: self.missing.len(),
            need,
            inserted: 0,
            resident_at_end: 0,
        };
        self.write_down(call);
        if !self.missing.is_empty() {
            self.store(need);
        }
        self.finish(arrival_id);
    }

    /// Writes a call down that is made now, if calls are.
    fn write_down(&mut self, call: Call) {
        if let Some(calls) = &mut self.calls {
            calls.tags.extend_from_slice(&self.tags);
            calls.tags.extend_from_slice(&self.missing_tags);
            calls.resident.extend_from_slice(&self.resident);
            calls.requests.push(call);
        }
    }

    /// Stores what was missing, in the place of `need` others.
    fn store(&mut self, need: usize) {
        self.policy.missed(&self.missing_tags);
        self.victims.clear();
        if need > 0 {
            let first = self.missing_tags[0];
            let evicted =
                self.policy
                    .evict_for(first, need, PLACEMENT.class, &|_| false, &mut self.victims);
            for victim in &self.victims {
                self.entries[at(self.holders[at(victim.0)])] = ABSENT;
                self.free.push(victim.0);
            }
            self.counts.evicted += u64::try_from(evicted).expect("small");
        }
        self.missing.truncate(self.free.len());
        for place in self.missing.iter().rev() {
            let entry = self.free.pop().expect("room");
            self.entries[at(self.blocks[*place])] = entry;
            self.holders[at(entry)] = self.blocks[*place];
            self.policy
                .insert(EntryId(entry), self.tags[*place], PLACEMENT);
            if let Some(calls) = &mut self.calls {
                calls.inserted.push((EntryId(entry), self.tags[*place]));
            }
        }
    }

    fn finish(&mut self, id: RequestId) {
        let blocks = &self.blocks;
        let now = blocks.iter().map(|block| self.entries[at(*block)]);
        self.resident.clear();
        self.resident
            .extend(now.filter(|entry| *entry != ABSENT).map(EntryId));
        self.policy.finish(id, None, &self.resident);
        if let Some(calls) = &mut self.calls
            && let Some(call) = calls.requests.last_mut()
        {
            call.inserted = self.missing.len();
            call.resident_at_end = self.resident.len();
            calls.resident.extend_from_slice(&self.resident);
        }
        debug_assert!(self.policy.len() <= self.capacity, "no more than fit");
    }
}

impl Replayed<'_> {
    /// Replays so many more requests and returns the calls that they made.
    pub fn calls_of(mut self, requests: usize) -> Calls {
        let before = self.counts;
        self.calls = Some(Calls::default());
        self.run(requests);
        let mut calls = self.calls.unwrap_or_default();
        calls.counts = self.counts.since(&before);
        calls
    }

    /// Makes calls that the same policy got in the same place, and says what they took.
    pub fn measure(mut self, calls: &Calls) -> Measured {
        let (mut tags, mut resident) = (calls.tags.as_slice(), calls.resident.as_slice());
        let mut inserted = calls.inserted.as_slice();
        let mut evicted = 0;
        let start = processor();
        for call in &calls.requests {
            self.policy.set_time(call.milliseconds);
            let arrival = Arrival {
                id: call.id,
                class: PLACEMENT.class,
                tags: take(&mut tags, call.tags),
                context: Context {
                    prompt_tokens: Some(call.prompt_tokens),
                    ..Context::default()
                },
            };
            let there = take(&mut resident, call.resident);
            self.policy.observe(&arrival, there);
            let missing = take(&mut tags, call.missing);
            if let Some(first) = missing.first() {
                self.policy.missed(missing);
                if call.need > 0 {
                    self.victims.clear();
                    evicted += self.policy.evict_for(
                        *first,
                        call.need,
                        PLACEMENT.class,
                        &|_| false,
                        &mut self.victims,
                    );
                }
                for (entry, tag) in take(&mut inserted, call.inserted) {
                    self.policy.insert(*entry, *tag, PLACEMENT);
                }
            }
            let there = take(&mut resident, call.resident_at_end);
            self.policy.finish(call.id, None, there);
        }
        let took = processor().saturating_sub(start);
        let same = u64::try_from(evicted).expect("small") == calls.counts.evicted;
        assert!(same, "a policy does the same twice");
        Measured {
            processor: took,
            counts: calls.counts,
            memory_bytes: self.policy.memory_bytes(),
            entries: self.capacity,
        }
    }
}
