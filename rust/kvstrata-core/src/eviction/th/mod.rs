//! Turn hazard: evicts what can still earn the fewest uses per block and second. docs/EVICTION.md
//! defines it.
//!
//! A directory of keys, resident ones and ghosts, learns from every access when runs of keys are
//! used again, by class of run and age (`table`). The victims are the ends of leaves of the tree
//! (`tree`), found among the oldest leaves of each class and age (`queues`, `victims`). The index
//! is the largest ratio of the probability of a use until some horizon to the expected time until
//! then: that of Gittins for the life times of jobs.

mod feature;
mod index;
mod queues;
mod request;
mod table;
mod tree;
mod vacant;
mod victims;

use self::feature::TICKS_PER_SECOND;
use self::queues::Queues;
use self::table::{ClassNumber, Table};
use self::tree::{Block, Queue, Run, Tick, Tree};
use super::ledger::{Ledger, PinChange};
use super::links::{Links, NONE};
use super::order::Place;
use super::request::{Arrival, Context, EndedKey, RequestId, Tag};
use super::{Class, ContainerId, EntryId, EvictionPolicy, Placement};

/// Keys the directory knows at most, where nothing else is said: so many, or so many for each entry
/// if those are more.
const DIRECTORY_MAX: usize = 1 << 22;
const DIRECTORY_FACTOR: usize = 8;
/// Keys up to which it forgets none, however long ago they were used.
const DIRECTORY_MIN: usize = 1 << 16;
/// Entries without a request that form a run.
const STRAY_RUN: u32 = 64;
/// Depth of the first of them; others come before it.
const STRAY_DEPTH: u32 = 1 << 20;
/// Ticks of the horizon of [`EvictionPolicy::reuse_probability`], and after which a ghost is
/// forgotten.
const HOUR: u32 = 3600 * TICKS_PER_SECOND;

/// The policy; see the module.
#[derive(Debug)]
pub struct Th {
    tree: Tree,
    table: Table,
    queues: Queues,
    ledger: Ledger,
    /// Ticks of [`TICKS_PER_SECOND`] since the first time that was said.
    now: u32,
    origin: Option<u64>,
    /// Number of the latest request.
    owner: u32,
    /// Requests since the table was refreshed.
    requests: u32,
    /// Keys that came since then.
    fresh_blocks: u32,
    directory_max: Option<usize>,
    /// Keys that have to go at an age of an hour or more before anything is predicted: the directory
    /// forgot others before they could be used again.
    unsure: usize,
    /// Most entries so far.
    entries_max: usize,
    /// The run and the head of entries without a request.
    stray: (u32, u32),
    last_block: u32,
    visited: u64,
    /// Known blocks of a request; kept for its memory.
    path: Vec<u32>,
    /// Entries at the end of a run; kept for its memory.
    ends: Vec<EntryId>,
}

impl Default for Th {
    fn default() -> Self {
        Self::new()
    }
}

impl Th {
    /// A policy without entries whose directory has the keys of the last hour.
    pub fn new() -> Self {
        Self::with_directory(None)
    }

    /// A policy whose directory has at most so many keys, however old, and the resident ones in any
    /// case; `None`: those of the last hour, up to four million or eight for each entry.
    pub fn with_directory(blocks_max: Option<usize>) -> Self {
        Self {
            tree: Tree::default(),
            table: Table::new(),
            queues: Queues::new(),
            ledger: Ledger::default(),
            now: 0,
            origin: None,
            owner: 0,
            requests: 0,
            fresh_blocks: 0,
            directory_max: blocks_max,
            unsure: 0,
            entries_max: 0,
            stray: (NONE, NONE),
            last_block: NONE,
            visited: 0,
            path: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Keys that the directory knows.
    pub fn directory_len(&self) -> usize {
        self.tree.len()
    }

    /// Classes of runs that were seen.
    pub fn class_count(&self) -> usize {
        self.table.len()
    }

    fn requeue(&mut self, run: u32) {
        self.queues
            .requeue(&mut self.tree, &mut self.table, run, self.now);
    }

    /// A run of nothing, in no list.
    fn empty_run(&self, class: ClassNumber, rows: u16) -> Run {
        Run {
            tick: Tick::of(self.ledger.now()),
            last: self.now,
            parent: NONE,
            child: NONE,
            tail: NONE,
            live_tail: NONE,
            len: 0,
            live: 0,
            children: 0,
            live_children: 0,
            beyond: 0,
            owner: self.owner,
            by_age: Place::NOWHERE,
            by_class: Links::unlinked(),
            class,
            rows,
            frequency: 1,
            fan_out: 0,
            turn: 1,
            bin: 0,
            queue: Queue::None,
            parked: false,
        }
    }

    /// Tells the runs above one that something of it is resident now, or nothing any more.
    fn change_live(&mut self, run: u32, live: bool) {
        let mut number = self.tree.run(run).map_or(NONE, |run| run.parent);
        while let Some(run) = self.tree.run_mut(number) {
            let was_live = run.is_live();
            run.live_children = if live {
                run.live_children.saturating_add(1)
            } else {
                run.live_children.saturating_sub(1)
            };
            let (is_live, parent) = (run.is_live(), run.parent);
            self.requeue(number);
            if is_live == was_live {
                return;
            }
            number = parent;
        }
    }

    /// The block of a new entry, which may be one that no request brought.
    fn block_for(&mut self, tag: Tag, rows: u16) -> u32 {
        let guesses = [
            self.last_block.wrapping_add(1),
            self.last_block.wrapping_sub(1),
        ];
        let near = |guess: &u32| self.tree.block(*guess).is_some_and(|b| b.tag == tag);
        let guess = guesses.into_iter().find(near).unwrap_or(NONE);
        let found = self.tree.find(tag, guess);
        if let Some(number) = found {
            let block = self.tree.block(number);
            let free = block.is_some_and(|block| block.entry == NONE);
            let same = block.and_then(|block| self.tree.run(block.run));
            if free && same.is_some_and(|run| run.rows == rows) {
                return number;
            }
        }
        self.add_stray(tag, rows, found.is_none())
    }

    /// Adds a block before the last one that no request brought, or as a run of its own.
    fn add_stray(&mut self, tag: Tag, rows: u16, named: bool) -> u32 {
        let (run, head) = self.stray;
        let goes_on = self.tree.run(run).is_some_and(|own| {
            own.owner == 0
                && own.rows == rows
                && own.last == self.now
                && own.bin == 0
                && own.parent == NONE
                && own.len < STRAY_RUN
                && self.tree.block(head).is_some_and(|head| head.run == run)
        });
        let run = if goes_on {
            run
        } else {
            let features = feature::RequestFeatures::unknown().of_run(1);
            let class = self.table.class(features);
            let mut new = self.empty_run(class, rows);
            new.owner = 0;
            let number = self.tree.add_run(new);
            self.queues.push_youngest(&mut self.tree, number);
            number
        };
        let before = goes_on.then(|| self.tree.block(head).map(|head| head.depth));
        let depth = before.flatten().map_or(STRAY_DEPTH, |depth| depth - 1);
        let number = self.tree.add_block(
            Block {
                tag,
                run,
                entry: NONE,
                parent: NONE,
                depth,
            },
            named,
        );
        if goes_on && let Some(head) = self.tree.block_mut(head) {
            head.parent = number;
        }
        if let Some(run) = self.tree.run_mut(run) {
            run.len += 1;
            if !goes_on {
                run.tail = number;
            }
            let class = run.class;
            self.table.begin(class, 1);
        }
        self.stray = (run, number);
        number
    }

    /// Keys that the directory may know.
    fn directory_max(&self) -> usize {
        self.directory_max.unwrap_or_else(|| {
            let all = self.entries_max.saturating_mul(DIRECTORY_FACTOR);
            all.max(DIRECTORY_MAX)
        })
    }

    /// Forgets runs of ghosts that were not used for an hour, where no number of keys is given.
    fn forget_old(&mut self) {
        while self.directory_max.is_none()
            && self.tree.len() > DIRECTORY_MIN
            && let Some(number) = self.queues.oldest_dead()
            && let Some(run) = self.tree.run(number)
            && self.now.saturating_sub(run.last) >= HOUR
        {
            self.tree.prefetch_ghosts_beside(number);
            self.trim_end(number);
        }
    }

    /// Forgets ghosts until the directory is as small as it has to be.
    fn trim(&mut self) {
        let most = self.directory_max();
        let mut trimmed = false;
        while self.tree.len() > most.max(self.ledger.len()) {
            let Some(run) = self.queues.oldest_dead() else {
                self.trim_ends();
                return;
            };
            self.tree.prefetch_ghosts_beside(run);
            self.trim_end(run);
            trimmed = true;
        }
        if trimmed && let Some(next) = self.queues.oldest_dead() {
            self.tree.prefetch_ghosts(next);
        }
    }

    /// Forgets the ghosts at the end of one run, and the run if nothing else is left.
    fn trim_end(&mut self, number: u32) {
        let Some(mut run) = self.tree.run(number).copied() else {
            return;
        };
        if run.children > 0 {
            return;
        }
        self.tree.prefetch_more_ghosts(&run);
        let (age, mut gone) = (self.now.saturating_sub(run.last), 0);
        while run.len > 0 && run.tail != run.live_tail {
            let before = self.tree.before(run.tail);
            self.tree.free_block(run.tail);
            run.tail = before.unwrap_or(NONE);
            run.len -= 1;
            gone += 1;
            self.unsure = if age < HOUR {
                self.tree.len()
            } else {
                self.unsure.saturating_sub(1)
            };
        }
        self.table
            .forget(run.class, usize::from(run.bin), age, gone);
        if let Some(place) = self.tree.run_mut(number) {
            (place.tail, place.len) = (run.tail, run.len);
        }
        if run.len > 0 {
            return;
        }
        self.queues.unqueue(&mut self.tree, number);
        self.queues.remove_age(&self.tree, number);
        self.tree.free_run(number);
        if let Some(parent) = self.tree.run_mut(run.parent) {
            parent.children = parent.children.saturating_sub(1);
            if parent.child == number {
                parent.child = NONE;
            }
            self.requeue(run.parent);
        }
    }

    /// Forgets the ghosts at the ends of all runs: no run is there that is nothing but ghosts.
    fn trim_ends(&mut self) {
        for number in self.queues.oldest_first() {
            self.trim_end(number);
        }
    }
}

impl EvictionPolicy for Th {
    fn name(&self) -> &'static str {
        "th"
    }

    fn set_time(&mut self, milliseconds: u64) {
        let origin = *self.origin.get_or_insert(milliseconds);
        let ticks = milliseconds.saturating_sub(origin) * u64::from(TICKS_PER_SECOND) / 1000;
        self.now = self.now.max(u32::try_from(ticks).unwrap_or(u32::MAX));
    }

    fn observe(&mut self, arrival: &Arrival<'_>, _resident: &[EntryId]) {
        self.request(arrival.class, arrival.tags, &arrival.context);
        self.forget_old();
        self.trim();
    }

    fn finish(&mut self, _id: RequestId, _output_tokens: Option<u32>, _resident: &[EntryId]) {
        // A request counts once, when it arrives.
    }

    fn ended(&mut self, class: Class, keys: &[EndedKey]) {
        let tags: Vec<Tag> = keys.iter().map(|key| key.tag).collect();
        self.request(class, &tags, &Context::default());
        self.forget_old();
        self.trim();
    }

    fn evict_for(
        &mut self,
        tag: Tag,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        victims: &mut Vec<EntryId>,
    ) -> usize {
        let own = self.tree.find(tag, NONE).and_then(|at| self.tree.block(at));
        let worth = match own.and_then(|block| self.tree.run(block.run)) {
            Some(run) if self.table.is_ready() => queues::score(&mut self.table, run, self.now),
            _ => f32::INFINITY,
        };
        let chosen = self.choose(need, class, protected, worth);
        for entry in &chosen {
            self.remove(*entry);
        }
        victims.extend(&chosen);
        chosen.len()
    }

    fn predicts(&self) -> bool {
        true
    }

    /// Nothing, too, where the directory does not reach back an hour, until all of it does again: who
    /// comes back later than it reaches would be taken for one that never does.
    fn reuse_probability(&self, tag: Tag) -> Option<f32> {
        if self.unsure > 0 {
            return None;
        }
        let number = self.tree.find(tag, NONE)?;
        let run = self.tree.run(self.tree.block(number)?.run)?;
        self.table.within_hour(run.class)
    }

    fn insert(&mut self, entry: EntryId, tag: Tag, placement: Placement) {
        self.remove(entry);
        let number = self.block_for(tag, placement.class.0);
        if !self.ledger.insert(entry, number, placement) {
            return;
        }
        self.last_block = number;
        self.entries_max = self.entries_max.max(self.ledger.len());
        let tick = self.ledger.now();
        let Some(block) = self.tree.block_mut(number) else {
            return;
        };
        block.entry = entry.0;
        let (run_number, depth) = (block.run, block.depth);
        let Some(run) = self.tree.run(run_number) else {
            return;
        };
        let live_tail = self.tree.block(run.live_tail).filter(|_| run.live > 0);
        let deeper = live_tail.is_none_or(|tail| tail.depth < depth);
        let was_live = run.is_live();
        let Some(run) = self.tree.run_mut(run_number) else {
            return;
        };
        run.live += 1;
        run.tick = Tick::of(tick);
        if deeper {
            run.live_tail = number;
            run.parked = false;
        }
        if run.queue != Queue::Leaf {
            self.requeue(run_number);
        }
        if !was_live {
            self.change_live(run_number, true);
        }
        self.trim();
    }

    fn access(&mut self, entry: EntryId) {
        self.access_request(&[entry]);
    }

    fn access_request(&mut self, head_first: &[EntryId]) {
        let mut paths: Vec<(Class, Vec<Tag>)> = Vec::new();
        for entry in head_first {
            let node = self.ledger.node(*entry);
            let tag = node.and_then(|node| self.tree.block(node)).map(|b| b.tag);
            let (Some(class), Some(tag)) = (self.ledger.class(*entry), tag) else {
                continue;
            };
            match paths.iter_mut().find(|(of, _)| *of == class) {
                Some((_, tags)) => tags.push(tag),
                None => paths.push((class, vec![tag])),
            }
        }
        for (class, tags) in paths {
            self.request(class, &tags, &Context::default());
        }
    }

    fn remove(&mut self, entry: EntryId) {
        let Some(number) = self.ledger.remove(entry) else {
            return;
        };
        let Some(block) = self.tree.block_mut(number) else {
            return;
        };
        block.entry = NONE;
        let run_number = block.run;
        let leaves_tail = self
            .tree
            .run(run_number)
            .is_some_and(|run| run.live_tail == number);
        let tail = if leaves_tail {
            self.tree.resident_from(number)
        } else {
            None
        };
        let Some(run) = self.tree.run_mut(run_number) else {
            return;
        };
        run.live = run.live.saturating_sub(1);
        if leaves_tail {
            run.live_tail = tail.unwrap_or(NONE);
            run.parked = false;
        }
        let (rows, is_live) = (run.rows, run.is_live());
        self.requeue(run_number);
        if !is_live {
            self.change_live(run_number, false);
        }
        let leaves = self.queues.leaves_mut(rows);
        leaves.budget = leaves.budget.saturating_sub(1);
    }

    fn pin(&mut self, entry: EntryId) {
        self.ledger.pin(entry);
    }

    fn unpin(&mut self, entry: EntryId) {
        if let PinChange::Free(number) = self.ledger.unpin(entry)
            && let Some(run_number) = self.tree.block(number).map(|block| block.run)
            && let Some(run) = self.tree.run_mut(run_number)
            && run.parked
        {
            run.parked = false;
            self.requeue(run_number);
        }
    }

    fn evictable(&self, class: Class) -> usize {
        self.ledger.evictable(class)
    }

    fn next_victims(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
    ) -> Option<Vec<EntryId>> {
        if self.ledger.evictable(class) < need {
            return None;
        }
        let mut chosen = self.choose(need, class, protected, f32::INFINITY);
        if chosen.len() < need {
            self.choose_anywhere(need, class, protected, &mut chosen);
        }
        (chosen.len() == need).then_some(chosen)
    }

    fn coldest(&mut self, class: Class) -> Option<u64> {
        let victim = self.next_victims(1, class, &|_| false)?.pop()?;
        let block = self.tree.block(self.ledger.node(victim)?)?;
        self.tree.run(block.run).map(|run| run.tick.number())
    }

    fn now(&self) -> u64 {
        self.ledger.now()
    }

    fn visited(&self) -> u64 {
        self.visited
    }

    fn coldest_containers(&self, class: Class, most: usize) -> Vec<(ContainerId, u64)> {
        self.ledger.coldest_containers(class, most)
    }

    fn remove_container(&mut self, container: ContainerId, victims: &mut Vec<EntryId>) -> bool {
        let Some(own) = self.ledger.unpinned_entries_of(container) else {
            return false;
        };
        for entry in &own {
            self.remove(*entry);
        }
        victims.extend(own);
        true
    }

    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes()
            + self.table.memory_bytes()
            + self.queues.memory_bytes()
            + self.ledger.memory_bytes()
    }
}
