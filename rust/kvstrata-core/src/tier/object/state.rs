//! What changes while an object tier runs: behind one lock, never held over a request.

use core::time::Duration;
use std::collections::VecDeque;
use std::time::Instant;

use hashbrown::HashMap;

use crate::index::Fingerprint;
use crate::job::JobKind;
use crate::key::Key;
use crate::sys::sync::Arc;
use crate::tier::object::Place;
use crate::tier::object::deletions::Deletions;
use crate::tier::phase::Phase;
use crate::tier::request::{Item, Request};

/// Most keys whose objects are known not to be theirs, of each kind.
const STRANGE_MAX: usize = 1 << 16;
/// Reads that may start one after the other while writes wait.
const READS_IN_A_ROW_MAX: u32 = 7;
/// Retries that may be spent at once.
const RETRY_TOKENS_MAX: u32 = 64;
/// Requests that succeed for each retry that is earned.
const REQUESTS_PER_RETRY: u32 = 10;

/// One row of a job.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) request: Arc<Request>,
    pub(super) position: usize,
    pub(super) item: Item,
    pub(super) place: Arc<Place>,
    /// The state's when it was begun: another one means that a reset came between.
    pub(super) generation: u64,
}

/// A key that the server is being asked for.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) key: Key,
    /// Since when.
    pub(super) since: Instant,
    /// Whether a question is on its way.
    pub(super) under_way: bool,
}

/// A key that is being stored, or loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moving {
    rows: usize,
    /// It was removed meanwhile.
    removed: bool,
}

/// How many further attempts may be made: a tenth of all requests in the long run.
#[derive(Debug)]
pub(super) struct RetryBudget {
    tokens: u32,
    successes: u32,
}

impl RetryBudget {
    pub(super) const fn new() -> Self {
        Self {
            tokens: RETRY_TOKENS_MAX,
            successes: 0,
        }
    }

    /// Counts a request that succeeded.
    pub(super) const fn earn(&mut self) {
        self.successes = self.successes.saturating_add(1);
        if self.successes >= REQUESTS_PER_RETRY {
            self.successes = 0;
            if self.tokens < RETRY_TOKENS_MAX {
                self.tokens = self.tokens.saturating_add(1);
            }
        }
    }

    /// Whether another attempt may be made; it then is paid for.
    pub(super) const fn spend(&mut self) -> bool {
        let able = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        able
    }
}

/// The state of an object tier.
#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// Where rows go; `None` until the bucket could be used.
    pub(super) place: Option<Arc<Place>>,
    /// Raised by each reset.
    pub(super) generation: u64,
    /// A reset is not recorded: nothing is served or stored.
    pub(super) reset_failed: bool,
    /// A reset was asked for before the bucket could be used.
    pub(super) reset_wanted: bool,
    pub(super) reads: VecDeque<Work>,
    pub(super) writes: VecDeque<Work>,
    reads_in_a_row: u32,
    /// Requests for rows under way, and their payload bytes.
    pub(super) running: usize,
    pub(super) running_bytes: u64,
    /// Jobs by their deadlines, which are all equally far away.
    pub(super) deadlines: VecDeque<Arc<Request>>,
    pub(super) asked: HashMap<u64, Asked>,
    pub(super) to_ask: VecDeque<u64>,
    /// Questions under way.
    pub(super) questions: usize,
    /// When the last listing that saw the whole namespace began.
    pub(super) listed_at: Option<Instant>,
    /// Whether anything was looked up since the last listing began.
    pub(super) looked_up: bool,
    /// Keys whose objects are not theirs, for the next store to overwrite.
    pub(super) foreign: HashMap<u64, ()>,
    /// Keys in whose places are objects of newer builds, and since when that is known.
    newer: HashMap<u64, Instant>,
    storing: HashMap<u64, Moving>,
    loading: HashMap<u64, Moving>,
    pub(super) deletions: Deletions,
    pub(super) load_bytes_open: u64,
    pub(super) store_bytes_open: u64,
    pub(super) retries: RetryBudget,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Open,
            place: None,
            generation: 0,
            reset_failed: false,
            reset_wanted: false,
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            reads_in_a_row: 0,
            running: 0,
            running_bytes: 0,
            deadlines: VecDeque::new(),
            asked: HashMap::new(),
            to_ask: VecDeque::new(),
            questions: 0,
            listed_at: None,
            looked_up: true,
            foreign: HashMap::new(),
            newer: HashMap::new(),
            storing: HashMap::new(),
            loading: HashMap::new(),
            deletions: Deletions::default(),
            load_bytes_open: 0,
            store_bytes_open: 0,
            retries: RetryBudget::new(),
        }
    }

    /// Where rows go, while anything may be served.
    pub(super) fn serving(&self) -> Option<&Arc<Place>> {
        self.place.as_ref().filter(|_| !self.reset_failed)
    }

    /// Puts rows of a job in line.
    pub(super) fn enqueue(
        &mut self,
        request: &Arc<Request>,
        place: &Arc<Place>,
        positions: impl IntoIterator<Item = usize>,
    ) {
        for position in positions {
            let Some(item) = request.items.get(position) else {
                continue;
            };
            let work = Work {
                request: Arc::clone(request),
                position,
                item: *item,
                place: Arc::clone(place),
                generation: self.generation,
            };
            match request.kind {
                JobKind::Load => self.reads.push_back(work),
                JobKind::Store => self.writes.push_back(work),
            }
        }
        self.deadlines.push_back(Arc::clone(request));
    }

    /// The next row to move: reads first, but one write after every seven of them.
    pub(super) fn next_work(&mut self) -> Option<Work> {
        let write = !self.writes.is_empty()
            && (self.reads.is_empty() || self.reads_in_a_row >= READS_IN_A_ROW_MAX);
        let work = if write {
            self.reads_in_a_row = 0;
            self.writes.pop_front()
        } else {
            self.reads_in_a_row = self.reads_in_a_row.saturating_add(1);
            self.reads.pop_front()
        };
        if let Some(work) = &work {
            let of = work.item.fingerprint.half();
            let moving = self.moving(work.request.kind).entry(of).or_default();
            moving.rows = moving.rows.saturating_add(1);
        }
        work
    }

    const fn moving(&mut self, kind: JobKind) -> &mut HashMap<u64, Moving> {
        match kind {
            JobKind::Store => &mut self.storing,
            JobKind::Load => &mut self.loading,
        }
    }

    /// Notes that the object of a key is not its row.
    pub(super) fn mark_foreign(&mut self, of: u64) {
        if self.foreign.len() >= STRANGE_MAX {
            self.foreign.clear();
        }
        self.foreign.insert(of, ());
    }

    /// Notes that the object of a key is a newer build's.
    pub(super) fn mark_newer(&mut self, of: u64, now: Instant) {
        if self.newer.len() >= STRANGE_MAX {
            self.newer.clear();
        }
        self.newer.insert(of, now);
    }

    /// Whether a key is absent whatever is listed: it was removed, or its object is a newer build's,
    /// which is believed for `newer_for`.
    pub(super) fn hides(&self, of: u64, now: Instant, newer_for: Duration) -> bool {
        let is_newer = || {
            let since = self.newer.get(&of);
            since.is_some_and(|since| now.saturating_duration_since(*since) < newer_for)
        };
        self.deletions.hides(of) || (!self.newer.is_empty() && is_newer())
    }

    /// Forgets what is known of objects: another epoch has others.
    pub(super) fn forget_objects(&mut self) {
        self.foreign.clear();
        self.newer.clear();
        self.deletions.clear();
    }

    /// Notes that a key was removed: what is under way for it says nothing of it any more.
    pub(super) fn note_removed(&mut self, of: u64) {
        for moving in [&mut self.storing, &mut self.loading] {
            if let Some(moving) = moving.get_mut(&of) {
                moving.removed = true;
            }
        }
    }

    /// Whether the key of some work under way was removed since it began.
    pub(super) fn was_removed(&self, work: &Work) -> bool {
        let moving = match work.request.kind {
            JobKind::Store => &self.storing,
            JobKind::Load => &self.loading,
        };
        let moving = moving.get(&work.item.fingerprint.half());
        moving.is_some_and(|moving| moving.removed)
    }

    /// Notes that some work has ended; says whether its key was removed meanwhile.
    pub(super) fn end_moving(&mut self, kind: JobKind, of: Fingerprint) -> bool {
        let all = self.moving(kind);
        let Some(moving) = all.get_mut(&of.half()) else {
            return false;
        };
        moving.rows = moving.rows.saturating_sub(1);
        let ended = *moving;
        if ended.rows == 0 {
            all.remove(&of.half());
        }
        ended.removed
    }

    /// Takes the rows out of the queues that are to be given up.
    pub(super) fn take_queued(&mut self, gone: impl Fn(&Work) -> bool) -> Vec<Work> {
        let mut taken = Vec::new();
        for queue in [&mut self.reads, &mut self.writes] {
            if queue.iter().any(&gone) {
                for work in core::mem::take(queue) {
                    if gone(&work) {
                        taken.push(work);
                    } else {
                        queue.push_back(work);
                    }
                }
            }
        }
        taken
    }
}
