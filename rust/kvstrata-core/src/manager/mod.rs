//! Which requests ask for which rows, wait for them and hold them: the state of a manager of vLLM's
//! offloading (`OffloadingManager` in `vllm/v1/kv_offload/base.py`) beside its [`CpuTier`].
//!
//! A lookup starts nothing and takes no slot. It pins what is ready, and notes what a tier below
//! has. At the end of a step ([`Manager::end_step`]) rows are queued to be loaded from below: those
//! of the span on which all groups of a request agree ([`span`]), each once, whoever else waits for
//! it. Queued rows get slots in waves, as many as there is room for and as their share of the arena
//! allows. What has come is held for those who waited, until they take it, ask and find all they
//! want, end, or have waited too long.
//!
//! Pure: no clock, no files, no threads; its caller holds one lock around it and the tier, and says
//! what time it is.

mod lookup;
mod plan;
mod queue;
mod requests;
pub mod span;
mod start;
mod stats;
mod step;
mod step_end;

use hashbrown::{HashMap, HashSet};

use crate::cpu::{Asker, CpuTier, Handle, Place, Prepared, Presence, User};
use crate::error::Result;
use crate::eviction::request::Context;
use crate::key::{GroupId, Key};
use queue::Queue;
pub use requests::{Allowed, RequestId};
use requests::{Request, Requests};
use stats::Counters;
pub use step_end::{Start, StepEnd};

/// Most keys that one request can ask for in a step; more are misses.
pub const ASKED_MAX: usize = 1 << 22;

/// What a lookup answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No row for this request.
    Miss,
    /// A row that can be loaded; it stays for this step.
    Hit,
    /// A row that is on its way, or is known in a tier below.
    Pending,
    /// A tier does not know yet.
    Retry,
}

/// What a lookup asks others.
pub trait Outside {
    /// Whether a tier below has a row; `None` while it does not know.
    fn has(&mut self, tier: usize, key: &Key) -> Option<bool>;
    /// The token of the request's prompt that a key's chunk ends with.
    fn position(&mut self, request: RequestId, key: &Key) -> Option<u64>;
}

/// How a manager is made.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Number of tiers below.
    pub tiers: usize,
    /// Seconds that a request may be told to wait for rows. Time in which it does not ask, because
    /// there is no room for it to run, counts little; after so many seconds without asking it waits
    /// for nothing any more, and may wait anew.
    pub wait_seconds: f64,
    /// Thousandths of the arena that rows on their way from below and held for requests may take.
    pub share: u32,
    /// Thousandths of the arena that the rows of one request may take.
    pub request_share: u32,
    /// Tokens of a chunk per group.
    pub tokens: Vec<(GroupId, u64)>,
}

/// What became of one row of a load from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The slot holds the row.
    Good,
    /// It does not.
    Bad,
    /// It does not, and the machine may still write to it.
    Busy,
}

/// The state; see the module.
#[derive(Debug)]
pub struct Manager {
    options: ManagerOptions,
    requests: Requests,
    /// Requests that asked in this step, in the order of their first asking.
    asking: Vec<RequestId>,
    queue: Queue,
    /// How many requests hold a row, by its handle.
    held: HashMap<Handle, (u32, u64)>,
    held_bytes: u64,
    /// Keys of rows that some worker did not copy.
    refused: HashSet<Key>,
    counters: Counters,
    is_stopped: bool,
    /// Requests that nobody began and that were forgotten.
    forgotten: Vec<RequestId>,
    /// Whether requests have ended since the queue was looked through.
    has_ended: bool,
    /// Number of the step that ended last.
    steps: u64,
}

impl Manager {
    /// A manager without requests.
    pub fn new(options: ManagerOptions) -> Self {
        Self {
            options,
            requests: Requests::default(),
            asking: Vec::new(),
            queue: Queue::default(),
            held: HashMap::new(),
            held_bytes: 0,
            refused: HashSet::new(),
            counters: Counters::default(),
            is_stopped: false,
            forgotten: Vec::new(),
            has_ended: false,
            steps: 0,
        }
    }

    /// Answers misses from now on.
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Takes up a request; `is_known` where somebody will say that it ended. `None` where there are
    /// too many.
    pub fn begin(&mut self, allowed: Allowed, is_known: bool) -> Option<RequestId> {
        self.requests.begin(allowed, is_known)
    }

    /// Somebody will say of a request that it ended.
    pub fn know(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(id) {
            request.is_known = true;
        }
    }

    /// A request has arrived with these keys, each with the token of the prompt that its chunk ends
    /// with: its one access to the CPU tier's rows, of which those that are there stay until it runs.
    /// Of a request that may not load from the CPU tier nothing is counted. `now` is as for
    /// [`Manager::end_step`].
    pub fn observe(
        &mut self,
        cpu: &mut CpuTier,
        id: RequestId,
        keys: &[(Key, u64)],
        context: Context,
        now: f64,
    ) {
        cpu.set_time(step::milliseconds(now));
        if self.requests.get(id).is_some_and(|one| one.allowed.cpu) && !self.is_stopped {
            cpu.observe(id.number(), keys, context);
            cpu.waits(id.number());
        }
    }

    /// A request was taken out of the batch, and waits to run again: its rows stay until it does.
    pub fn preempted(&mut self, cpu: &mut CpuTier, id: RequestId) {
        if self.requests.get(id).is_some() {
            cpu.waits(id.number());
        }
    }

    /// A request has ended, with a response of so many tokens: what it pinned and waited for goes.
    pub fn end(&mut self, cpu: &mut CpuTier, id: RequestId, output_tokens: Option<u32>) {
        self.settle(cpu, id);
        if self.requests.end(id).is_some() {
            self.has_ended = true;
            cpu.finish(id.number(), output_tokens);
        }
    }

    /// Lets everything go that a request pinned and holds; it waits no longer, and runs.
    pub fn settle(&mut self, cpu: &mut CpuTier, id: RequestId) {
        cpu.runs(id.number());
        self.unpin(cpu, id);
        self.release_holds(cpu, id);
        if let Some(request) = self.requests.get_mut(id) {
            self.has_ended |= request.waits_since.take().is_some();
            request.is_tired = false;
            request.limit = None;
        }
    }

    /// Pins the rows of all keys for a worker; see [`CpuTier::prepare_load_for`]. `ends` are the
    /// tokens of the prompt that the keys' chunks end with. The request has what it waited for.
    pub fn prepare_load(
        &mut self,
        cpu: &mut CpuTier,
        id: Option<RequestId>,
        keys: &[Key],
        ends: &[Option<u64>],
    ) -> Option<Vec<Place>> {
        let request = id.map_or(0, RequestId::number);
        let places = cpu.prepare_load_for(Asker { request, ends }, keys)?;
        if let Some(id) = id {
            self.settle(cpu, id);
            if let Some(request) = self.requests.get_mut(id) {
                request.given = places.iter().map(|place| place.handle).collect();
            }
        }
        Some(places)
    }

    /// The tier below that gave a row while the request waited for it.
    pub fn source(&self, id: RequestId, key: &Key) -> Option<usize> {
        self.requests.get(id)?.brought.get(key).copied()
    }

    /// Ends stores of a worker; positions of the keys whose rows became ready. Refused ones go.
    pub fn complete_store(&mut self, cpu: &mut CpuTier, keys: &[Key], success: bool) -> Vec<usize> {
        if self.refused.is_empty() {
            return cpu.complete_store(keys, success && !self.is_stopped);
        }
        let mut ready = Vec::new();
        for (position, key) in keys.iter().enumerate() {
            let good = success && !self.is_stopped && !self.refused.remove(key);
            if !cpu
                .complete_store(core::slice::from_ref(key), good)
                .is_empty()
            {
                ready.push(position);
            }
        }
        ready
    }

    /// Lets rows go that the workers have loaded; refused ones that are gone now.
    pub fn complete_load(&mut self, cpu: &mut CpuTier, keys: &[Key]) -> Vec<Key> {
        cpu.complete_load(keys);
        self.drop_refused(cpu)
    }

    /// Some worker did not copy these rows: they are misses until their last user is done, and then
    /// gone. Keys without a row are ignored: a reset has forgotten them. Requests that were given
    /// such a row find it no more, though a tier below may have it: they would be given it again, and
    /// again in vain.
    pub fn refuse(&mut self, cpu: &mut CpuTier, keys: &[Key]) {
        let mut rows: HashMap<Handle, Key> = HashMap::new();
        for (key, presence) in keys.iter().zip(cpu.lookup(keys)) {
            if presence != Presence::Absent {
                self.refused.insert(*key);
            }
            if presence == Presence::Ready {
                rows.extend(cpu.handle_of(key).map(|handle| (handle, *key)));
            }
        }
        if rows.is_empty() {
            return;
        }
        for id in self.requests.ids() {
            let Some(request) = self.requests.get_mut(id) else {
                continue;
            };
            let taken = request.given.iter().filter_map(|handle| rows.get(handle));
            request.unfit.extend(taken.copied());
        }
    }

    /// Forgets refused rows that nobody uses any more; which of them were there.
    pub fn drop_refused(&mut self, cpu: &mut CpuTier) -> Vec<Key> {
        let mut gone = Vec::new();
        self.refused.retain(|key| {
            let named = core::slice::from_ref(key);
            gone.extend(cpu.forget(named));
            cpu.lookup(named).first() != Some(&Presence::Absent)
        });
        gone
    }

    /// A load from below has ended. Rows that came are held for those who waited; the others are
    /// misses for them. Keys whose rows lookups find now.
    pub fn load_ended(&mut self, cpu: &mut CpuTier, rows: &[(Key, Handle, Outcome)]) -> Vec<Key> {
        let mut ready = Vec::new();
        for (key, handle, outcome) in rows {
            match outcome {
                Outcome::Good => {
                    if cpu.end_use(*handle, true) {
                        ready.push(*key);
                    }
                }
                Outcome::Bad => cpu.let_go(&[*handle], false),
                Outcome::Busy => cpu.abandon(&[*handle]),
            }
            let Some(row) = self.queue.ended(key, *handle) else {
                continue;
            };
            for waiter in row.waiters() {
                let Some(request) = self.requests.get_mut(*waiter) else {
                    continue;
                };
                if *outcome != Outcome::Good {
                    request.failed.insert(*key);
                    continue;
                }
                request.brought.insert(*key, row.tier);
                if request.is_waiting() && cpu.hold_more(*handle) {
                    request.holds.push(*handle);
                    request.held_bytes += row.bytes;
                    let (count, _) = self.held.entry(*handle).or_insert((0, row.bytes));
                    *count += 1;
                    if *count == 1 {
                        self.held_bytes += row.bytes;
                    }
                }
            }
        }
        ready
    }

    /// Forgets every row, and what requests know of rows. Loads under way end into nothing.
    pub fn reset(&mut self, cpu: &mut CpuTier) {
        for id in self.requests.ids() {
            self.settle(cpu, id);
            if let Some(request) = self.requests.get_mut(id) {
                request.failed.clear();
                request.brought.clear();
                request.given.clear();
                request.unfit.clear();
            }
        }
        self.queue.clear();
        self.refused.clear();
        cpu.reset();
    }

    /// Requests that nobody began, and that were forgotten since the last call.
    pub fn take_forgotten(&mut self) -> Vec<RequestId> {
        core::mem::take(&mut self.forgotten)
    }

    /// Whether rows wait to be loaded from below, or are being loaded.
    pub fn is_pending(&mut self) -> bool {
        if core::mem::take(&mut self.has_ended) {
            self.queue.prune(&self.requests);
        }
        self.queue.queued() > 0 || self.queue.loading() > 0
    }

    /// Gives up the pins of this step, and what was asked in it.
    fn unpin(&mut self, cpu: &mut CpuTier, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        for asked in request.asked.drain(..) {
            if let requests::Asked::Hit(handle) = asked {
                cpu.let_go(&[handle], true);
            }
        }
        request.wanted.clear();
        request.is_pending = false;
    }

    fn release_holds(&mut self, cpu: &mut CpuTier, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        request.held_bytes = 0;
        for handle in core::mem::take(&mut request.holds) {
            cpu.let_go(&[handle], true);
            if let Some((count, bytes)) = self.held.get_mut(&handle) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.held_bytes = self.held_bytes.saturating_sub(*bytes);
                    self.held.remove(&handle);
                }
            }
        }
    }

    /// Takes slots for the keys that have none; see [`CpuTier::prepare_store_for`]. `ends` are the
    /// tokens of the prompt that the keys' chunks end with.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_store(
        &mut self,
        cpu: &mut CpuTier,
        id: Option<RequestId>,
        keys: &[Key],
        ends: &[Option<u64>],
    ) -> Result<Option<Prepared>> {
        if self.is_stopped {
            return Ok(Some(Prepared::default()));
        }
        let request = id.map_or(0, RequestId::number);
        cpu.runs(request);
        // What is left out here reaches no tier below.
        cpu.set_bypass(self.options.tiers == 0);
        cpu.prepare_store_for(Asker { request, ends }, keys, User::Worker)
    }
}
