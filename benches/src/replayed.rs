//! Policies driven by real requests, without anything around them that costs more than they do.

#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use core::fmt;
use std::collections::VecDeque;
use std::time::Duration;

use kvstrata_core::eviction::request::{Arrival, Context, RequestId, Tag};
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};
use kvstrata_core::simulate::trace::{Trace, tag};

const PLACEMENT: Placement = Placement {
    class: Class(0),
    container: ContainerId(0),
};
const ABSENT: u32 = u32::MAX;
/// The name of a queue without any policy: what driving one costs.
const FIFO: &str = "fifo";
/// A tier holds one in so many of all blocks.
const SHARE: usize = 4;
/// Blocks of so many rounds are told apart.
const ROUNDS: u32 = 3;

#[derive(Debug)]
struct Request {
    milliseconds: u64,
    prompt_tokens: u32,
    /// Its blocks in [`Workload::blocks`].
    first: usize,
    end: usize,
}

/// Copies of a trace, interleaved.
#[derive(Debug)]
pub struct Workload {
    requests: Vec<Request>,
    blocks: Vec<u32>,
    tags: Vec<Tag>,
    unique: usize,
    /// Milliseconds from the first request to the last.
    span: u64,
    /// Whether the blocks of a round are those of the round before.
    is_repeated: bool,
}

fn number(count: usize) -> u32 {
    u32::try_from(count).expect("small")
}

impl Workload {
    /// So many copies of a trace of this project that a tier of `entries` blocks holds a quarter.
    pub fn of_trace(name: &str, entries: usize) -> Self {
        let path = format!("{}/traces/{name}.jsonl.gz", env!("CARGO_MANIFEST_DIR"));
        let text = std::process::Command::new("gzip")
            .arg("-dc")
            .arg(path)
            .output();
        let trace = Trace::parse(&text.expect("gzip is there").stdout).expect("a trace");
        let copies =
            (entries * SHARE).div_ceil(usize::try_from(trace.unique_blocks).expect("small"));
        let mut own = Self {
            requests: Vec::new(),
            blocks: Vec::new(),
            tags: Vec::new(),
            unique: copies * usize::try_from(trace.unique_blocks).expect("small"),
            span: trace.requests.last().map_or(0, |last| last.milliseconds),
            is_repeated: false,
        };
        for request in &trace.requests {
            for copy in 0..number(copies) {
                let first = own.blocks.len();
                own.blocks.extend(
                    request
                        .blocks()
                        .map(|block| block + copy * trace.unique_blocks),
                );
                own.requests.push(Request {
                    milliseconds: request.milliseconds,
                    prompt_tokens: request.prompt_tokens,
                    first,
                    end: own.blocks.len(),
                });
            }
        }
        own.tags = own.blocks.iter().map(|block| tag(*block)).collect();
        own
    }

    /// The same requests for whose blocks a tier of this many has room, in the order of their first use:
    /// once it has seen them, it finds all there is.
    #[must_use]
    pub fn that_fit(mut self, entries: usize) -> Self {
        let mut seen = vec![false; self.unique];
        let mut room = entries;
        let blocks = &self.blocks;
        self.requests.retain(|request| {
            let own = &blocks[request.first..request.end];
            let mut new: Vec<u32> = own.iter().copied().filter(|one| !seen[at(*one)]).collect();
            new.sort_unstable();
            new.dedup();
            let fits = new.len() <= room;
            if fits {
                room -= new.len();
                for one in &new {
                    seen[at(*one)] = true;
                }
            }
            fits
        });
        self.is_repeated = true;
        self
    }

    /// Number of requests.
    pub const fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Number of block accesses.
    pub fn accesses(&self) -> usize {
        let lengths = self.requests.iter().map(|one| one.end - one.first);
        lengths.sum()
    }
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Blocks asked for.
    pub accesses: u64,
    /// Blocks found without a gap before.
    pub hits: u64,
    /// Blocks evicted.
    pub evicted: u64,
}

impl Counts {
    /// What happened since another time.
    #[must_use]
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            accesses: self.accesses - before.accesses,
            hits: self.hits - before.hits,
            evicted: self.evicted - before.evicted,
        }
    }
}

/// The calls of some requests on a policy, as they are made: nothing has to be looked up or worked
/// out when they are made again.
#[derive(Debug, Default)]
pub struct Calls {
    requests: Vec<Call>,
    /// Of each request all tags, then those of what was missing.
    tags: Vec<Tag>,
    /// Of each request what was there when it arrived, then what was when it ended.
    resident: Vec<EntryId>,
    inserted: Vec<(EntryId, Tag)>,
    counts: Counts,
}

/// The calls of one request: how many of each kind.
#[derive(Clone, Copy, Debug)]
struct Call {
    id: RequestId,
    milliseconds: u64,
    prompt_tokens: u32,
    tags: usize,
    resident: usize,
    missing: usize,
    need: usize,
    inserted: usize,
    resident_at_end: usize,
}

/// Takes so many from the front.
fn take<'a, T>(all: &mut &'a [T], count: usize) -> &'a [T] {
    let (first, rest) = all.split_at(count);
    *all = rest;
    first
}

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

fn at(number: u32) -> usize {
    usize::try_from(number).expect("small")
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

/// What replaying some requests took.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    processor: Duration,
    counts: Counts,
    memory_bytes: usize,
    entries: usize,
}

impl fmt::Display for Measured {
    #[expect(
        clippy::as_conversions,
        clippy::cast_precision_loss,
        reason = "for people"
    )]
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accesses = self.counts.accesses.max(1) as f64;
        write!(
            formatter,
            "{:7.1} ns an access; {:.4} found, {:.3} evicted an access; {:6.1} bytes an entry",
            self.processor.as_secs_f64() * 1e9 / accesses,
            self.counts.hits as f64 / accesses,
            self.counts.evicted as f64 / accesses,
            self.memory_bytes as f64 / self.entries as f64,
        )
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

/// Processor time of this thread so far: other programs do not count.
pub(crate) fn processor() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanoseconds = u32::try_from(now.tv_nsec).expect("below a second");
    Duration::new(u64::try_from(now.tv_sec).expect("positive"), nanoseconds)
}

/// First in, first out.
#[derive(Debug, Default)]
struct Fifo(VecDeque<EntryId>);

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
