//! Runs in the order of their last access, by age and by class.

use std::collections::BinaryHeap;

use super::table::{BINS, ClassNumber, Table};
use super::tree::{Queue, Run, Runs, Tree};
use crate::eviction::links::{Links, List, NONE, Nodes};
use crate::eviction::order::{Chunks, Order, Walk};

/// Steps that are taken to find the place of a run that becomes a leaf late.
const STEPS_MAX: usize = 16;
/// Runs that become older together.
const TOGETHER: usize = 16;
/// Candidates kept beyond those that a rebuild finds.
const SPARE_CANDIDATES: usize = 4096;

/// The lists by class and age.
struct ByClass<'a>(&'a mut Runs);

impl Nodes for ByClass<'_> {
    fn links(&mut self, number: u32) -> Option<&mut Links> {
        self.0.get_mut(number).map(|run| &mut run.by_class)
    }
}

/// A run that may be the next victim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) score: f32,
    pub(super) last: u32,
    pub(super) run: u32,
    /// Not the first of its list: there only while those before it are victims.
    pub(super) later: bool,
    pub(super) class: ClassNumber,
    pub(super) bin: u8,
}

impl Ord for Candidate {
    /// The largest is the next victim: of the lowest score, and among those the oldest.
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        let scores = other.score.total_cmp(&self.score);
        scores
            .then(other.last.cmp(&self.last))
            .then(other.run.cmp(&self.run))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == core::cmp::Ordering::Equal
    }
}

impl Eq for Candidate {}

/// Leaves of one class of rows.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    /// One list per class and bin.
    lists: Vec<List>,
    /// Per class, which bins have any.
    occupied: Vec<u64>,
    /// The first runs of the lists, lowest score first. Some are out of date.
    pub(super) candidates: BinaryHeap<Candidate>,
    /// Victims that may be taken before all first runs are looked at anew.
    pub(super) budget: usize,
}

/// Where in [`Leaves::lists`] a list is.
fn slot(class: ClassNumber, bin: u8) -> usize {
    usize::from(class) * BINS + usize::from(bin)
}

impl Leaves {
    /// The oldest run of a class and bin.
    pub(super) fn first(&self, class: ClassNumber, bin: u8) -> u32 {
        let list = self.lists.get(slot(class, bin));
        list.map_or(NONE, |list| list.coldest())
    }

    fn link(&mut self, runs: &mut Runs, number: u32) -> Option<Candidate> {
        let run = *runs.get(number)?;
        let at = slot(run.class, run.bin);
        if self.lists.len() <= at {
            let classes = usize::from(run.class) + 1;
            self.lists.resize(classes * BINS, List::new());
            self.occupied.resize(classes, 0);
        }
        let list = self.lists.get_mut(at)?;
        let was_empty = list.is_empty();
        let mut colder = list.warmest();
        for _ in 0..STEPS_MAX {
            match runs.get(colder) {
                Some(other) if other.last > run.last => colder = other.by_class.colder(),
                _ => break,
            }
        }
        list.insert_warmer_than(&mut ByClass(runs), colder, number);
        if let Some(bits) = self.occupied.get_mut(usize::from(run.class)) {
            *bits |= 1 << run.bin;
        }
        was_empty.then_some(Candidate {
            score: 0.0,
            last: run.last,
            run: number,
            later: false,
            class: run.class,
            bin: run.bin,
        })
    }

    fn unlink(&mut self, runs: &mut Runs, number: u32) {
        let Some(run) = runs.get(number).copied() else {
            return;
        };
        if let Some(list) = self.lists.get_mut(slot(run.class, run.bin)) {
            list.unlink(&mut ByClass(runs), number);
            if list.is_empty()
                && let Some(bits) = self.occupied.get_mut(usize::from(run.class))
            {
                *bits &= !(1 << run.bin);
            }
        }
    }
}

/// All lists of runs.
#[derive(Debug)]
pub(super) struct Queues {
    /// All runs by bin of their age when they were looked at last.
    ages: [Order; BINS],
    chunks: Chunks,
    /// Dead runs by bin of age.
    dead: [List; BINS],
    /// Leaves by class of rows.
    leaves: Vec<Leaves>,
}

impl Queues {
    pub(super) fn new() -> Self {
        Self {
            ages: [Order::default(); BINS],
            chunks: Chunks::default(),
            dead: [List::new(); BINS],
            leaves: Vec::new(),
        }
    }

    /// The leaves of a class of rows, to change them.
    pub(super) fn leaves_mut(&mut self, rows: u16) -> &mut Leaves {
        let at = usize::from(rows);
        if self.leaves.len() <= at {
            self.leaves.resize_with(at + 1, Leaves::default);
        }
        match self.leaves.get_mut(at) {
            Some(leaves) => leaves,
            None => unreachable!("it was made just now"),
        }
    }

    /// All of them are looked at anew before the next victim is chosen.
    pub(super) fn invalidate(&mut self) {
        for leaves in &mut self.leaves {
            leaves.budget = 0;
        }
    }

    /// The run that is the next victim of each class of rows, about.
    pub(super) fn firsts(&self) -> impl Iterator<Item = u32> + '_ {
        let firsts = self.leaves.iter().map(|leaves| leaves.candidates.peek());
        firsts.flatten().map(|first| first.run)
    }

    /// Fetches the place of a run among those of its age.
    pub(super) fn prefetch_place(&self, tree: &Tree, number: u32) {
        if let Some(run) = tree.run(number) {
            self.chunks.prefetch(run.by_age);
        }
    }

    /// Makes a run the youngest of all.
    pub(super) fn push_youngest(&mut self, tree: &mut Tree, number: u32) {
        self.push_age(tree, number, 0);
    }

    /// Makes a run the youngest of an age.
    fn push_age(&mut self, tree: &mut Tree, number: u32, bin: usize) {
        if let Some(order) = self.ages.get_mut(bin)
            && let Some(run) = tree.run_mut(number)
        {
            run.bin = u8::try_from(bin).unwrap_or(run.bin);
            run.by_age = self.chunks.push_warmest(order, number);
            self.chunks.tidy(order, tree.runs_mut());
        }
    }

    /// Puts a run beside another one of the same age, on its younger side.
    pub(super) fn push_beside(&mut self, tree: &mut Tree, other: u32, number: u32) {
        let Some((bin, place)) = tree.run(other).map(|run| (run.bin, run.by_age)) else {
            return;
        };
        let Some(order) = self.ages.get_mut(usize::from(bin)) else {
            return;
        };
        let runs = tree.runs_mut();
        let colder = self.chunks.insert_colder_than(order, place, other, runs);
        self.chunks.replace(place, number);
        if let Some(other) = runs.get_mut(other) {
            other.by_age = colder;
        }
        if let Some(run) = runs.get_mut(number) {
            run.bin = bin;
            run.by_age = place;
        }
        self.chunks.tidy(order, runs);
    }

    /// Takes a run out of the order of all runs.
    pub(super) fn remove_age(&mut self, tree: &Tree, number: u32) {
        if let Some(run) = tree.run(number)
            && let Some(order) = self.ages.get_mut(usize::from(run.bin))
        {
            self.chunks.remove(order, run.by_age);
        }
    }

    /// Takes a run out of the list of its class and age.
    pub(super) fn unqueue(&mut self, tree: &mut Tree, number: u32) {
        let Some(run) = tree.run_mut(number) else {
            return;
        };
        let (queue, rows, bin) = (run.queue, run.rows, usize::from(run.bin));
        run.queue = Queue::None;
        match queue {
            Queue::None => {}
            Queue::Leaf => self.leaves_mut(rows).unlink(tree.runs_mut(), number),
            Queue::Dead => {
                if let Some(list) = self.dead.get_mut(bin) {
                    list.unlink(&mut ByClass(tree.runs_mut()), number);
                }
            }
        }
    }

    /// Puts a run into the list it belongs in.
    pub(super) fn requeue(&mut self, tree: &mut Tree, table: &mut Table, number: u32, now: u32) {
        let Some(run) = tree.run(number) else {
            return;
        };
        let wanted = if run.is_leaf() && !run.parked {
            Queue::Leaf
        } else if !run.is_live() && run.children == 0 && run.len > 0 {
            Queue::Dead
        } else {
            Queue::None
        };
        if run.queue == wanted {
            return;
        }
        self.unqueue(tree, number);
        let first = self.enqueue(tree, number, wanted);
        self.offer(tree, table, first, now);
    }

    /// Adds the first run of a list that was empty to the candidates.
    fn offer(&mut self, tree: &Tree, table: &mut Table, first: Option<Candidate>, now: u32) {
        let Some(mut new) = first else {
            return;
        };
        let Some(run) = tree.run(new.run) else {
            return;
        };
        let leaves = self.leaves_mut(run.rows);
        if leaves.candidates.len() >= leaves.occupied.len() * 8 + SPARE_CANDIDATES {
            leaves.budget = 0;
        }
        if leaves.budget > 0 {
            new.score = score(table, run, now);
            leaves.candidates.push(new);
        }
    }

    /// Puts a run into a list of its class and age; returns it if it is the first there.
    fn enqueue(&mut self, tree: &mut Tree, number: u32, queue: Queue) -> Option<Candidate> {
        let run = tree.run_mut(number)?;
        run.queue = queue;
        let (rows, bin) = (run.rows, usize::from(run.bin));
        match queue {
            Queue::None => None,
            Queue::Leaf => self.leaves_mut(rows).link(tree.runs_mut(), number),
            Queue::Dead => {
                let list = self.dead.get_mut(bin)?;
                list.push_warmest(&mut ByClass(tree.runs_mut()), number);
                None
            }
        }
    }

    /// Moves runs that have become older to the lists of their age, and counts them there.
    pub(super) fn advance(&mut self, tree: &mut Tree, table: &mut Table, now: u32) {
        // The oldest first: in each list they come one after the other.
        for bin in (0..BINS - 1).rev() {
            self.advance_bin(tree, table, bin, now);
        }
    }

    fn advance_bin(&mut self, tree: &mut Tree, table: &mut Table, bin: usize, now: u32) {
        let bound = table.start(bin + 1);
        let mut walk = Walk::new();
        let mut due = Vec::with_capacity(TOGETHER);
        loop {
            let Some(order) = self.ages.get_mut(bin) else {
                return;
            };
            while due.len() < TOGETHER {
                let ask = |number| tree.prefetch_run(number);
                let next = self.chunks.next(order, &mut walk, &ask);
                let is_due = |number: &u32| {
                    let run = tree.run(*number);
                    run.is_some_and(|run| now.saturating_sub(run.last) >= bound)
                };
                let Some(number) = next.filter(is_due) else {
                    break;
                };
                tree.prefetch_beside(number);
                due.push(number);
            }
            let is_end = due.len() < TOGETHER;
            for number in due.drain(..) {
                self.move_on(tree, table, number, now);
            }
            if is_end {
                break;
            }
        }
        if let Some(order) = self.ages.get_mut(bin) {
            self.chunks.end(order);
            self.chunks.tidy(order, tree.runs_mut());
        }
    }

    /// Moves a run to the lists of its age.
    fn move_on(&mut self, tree: &mut Tree, table: &mut Table, number: u32, now: u32) {
        let Some(run) = tree.run(number) else {
            return;
        };
        let (bin, class, blocks, queue) = (run.bin, run.class, run.len, run.queue);
        let next = table.bin(now.saturating_sub(run.last));
        table.age(class, usize::from(bin), next, blocks);
        self.unqueue(tree, number);
        self.remove_age(tree, number);
        self.push_age(tree, number, next);
        let first = self.enqueue(tree, number, queue);
        self.offer(tree, table, first, now);
    }

    /// The dead run that was used longest ago, about.
    pub(super) fn oldest_dead(&self) -> Option<u32> {
        let lists = self.dead.iter().rev();
        lists.map(|list| list.coldest()).find(|run| *run != NONE)
    }

    /// All runs, oldest first, about.
    pub(super) fn oldest_first(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        for order in self.ages.iter_mut().rev() {
            let mut walk = Walk::new();
            while let Some(run) = self.chunks.next(order, &mut walk, &|_| {}) {
                all.push(run);
            }
            self.chunks.end(order);
        }
        all
    }

    /// Looks at the first runs of all lists of a class of rows.
    pub(super) fn rebuild(
        &mut self,
        tree: &Tree,
        table: &mut Table,
        rows: u16,
        now: u32,
        budget: usize,
    ) {
        let leaves = self.leaves_mut(rows);
        leaves.budget = budget;
        let mut candidates = core::mem::take(&mut leaves.candidates).into_vec();
        candidates.clear();
        leaves.prefetch_firsts(tree);
        for (class, bits) in (0..).zip(&leaves.occupied) {
            let mut left = *bits;
            while left != 0 {
                let bin = u8::try_from(left.trailing_zeros()).unwrap_or(0);
                left &= left - 1;
                candidates.extend(leaves.candidate(tree, table, class, bin, now));
            }
        }
        leaves.candidates = candidates.into();
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        let of = |leaves: &Leaves| {
            leaves.lists.capacity() * size_of::<List>()
                + leaves.occupied.capacity() * size_of::<u64>()
                + leaves.candidates.capacity() * size_of::<Candidate>()
        };
        let leaves: usize = self.leaves.iter().map(of).sum();
        leaves + self.chunks.memory_bytes()
    }
}

impl Leaves {
    /// Fetches the first runs of all lists.
    fn prefetch_firsts(&self, tree: &Tree) {
        for list in &self.lists {
            tree.prefetch_run(list.coldest());
        }
    }

    /// The first run of a list as a candidate.
    pub(super) fn candidate(
        &self,
        tree: &Tree,
        table: &mut Table,
        class: ClassNumber,
        bin: u8,
        now: u32,
    ) -> Option<Candidate> {
        let number = self.first(class, bin);
        let run = tree.run(number)?;
        Some(Candidate {
            score: score(table, run, now),
            last: run.last,
            run: number,
            later: false,
            class,
            bin,
        })
    }
}

/// What a run is worth: its index, or nothing while too little was seen.
pub(super) fn score(table: &mut Table, run: &Run, now: u32) -> f32 {
    if table.is_ready() {
        let age = now.saturating_sub(run.last);
        table.index(run.class, age)
    } else {
        0.0
    }
}
