//! Runs in the order of their last access, by age and by class.

use std::collections::BinaryHeap;

use super::table::{BINS, ClassNumber, Table};
use super::tree::{Queue, Run, Tree};
use crate::chunked::Chunked;
use crate::eviction::links::{Links, List, NONE, Nodes};

/// Steps that are taken to find the place of a run that becomes a leaf late.
const STEPS_MAX: usize = 16;
/// Candidates kept beyond those that a rebuild finds.
const SPARE_CANDIDATES: usize = 4096;

/// The lists by age.
pub(super) struct ByAge<'a>(pub(super) &'a mut Chunked<Run>);

impl Nodes for ByAge<'_> {
    fn links(&mut self, number: u32) -> Option<&mut Links> {
        self.0.get_mut(number).map(|run| &mut run.by_age)
    }
}

/// The lists by class and age.
struct ByClass<'a>(&'a mut Chunked<Run>);

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

    fn link(&mut self, runs: &mut Chunked<Run>, number: u32) -> Option<Candidate> {
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

    fn unlink(&mut self, runs: &mut Chunked<Run>, number: u32) {
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
    ages: [List; BINS],
    /// Dead runs by bin of age.
    dead: [List; BINS],
    /// Leaves by class of rows.
    leaves: Vec<Leaves>,
}

impl Queues {
    pub(super) const fn new() -> Self {
        Self {
            ages: [List::new(); BINS],
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

    /// Makes a run the youngest of all.
    pub(super) fn push_youngest(&mut self, tree: &mut Tree, number: u32) {
        if let Some(run) = tree.run_mut(number) {
            run.bin = 0;
        }
        if let Some(list) = self.ages.first_mut() {
            list.push_warmest(&mut ByAge(tree.runs_mut()), number);
        }
    }

    /// Puts a run beside another one of the same age.
    pub(super) fn push_beside(&mut self, tree: &mut Tree, other: u32, number: u32) {
        let Some(bin) = tree.run(other).map(|run| run.bin) else {
            return;
        };
        if let Some(run) = tree.run_mut(number) {
            run.bin = bin;
        }
        if let Some(list) = self.ages.get_mut(usize::from(bin)) {
            list.insert_warmer_than(&mut ByAge(tree.runs_mut()), other, number);
        }
    }

    /// Takes a run out of the order of all runs.
    pub(super) fn remove_age(&mut self, tree: &mut Tree, number: u32) {
        let Some(bin) = tree.run(number).map(|run| run.bin) else {
            return;
        };
        if let Some(list) = self.ages.get_mut(usize::from(bin)) {
            list.unlink(&mut ByAge(tree.runs_mut()), number);
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
    pub(super) fn requeue(&mut self, tree: &mut Tree, table: &Table, number: u32, now: u32) {
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
    fn offer(&mut self, tree: &Tree, table: &Table, first: Option<Candidate>, now: u32) {
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
        loop {
            let number = self.ages.get(bin).map_or(NONE, |list| list.coldest());
            let Some(run) = tree.run(number) else {
                return;
            };
            let age = now.saturating_sub(run.last);
            if age < bound {
                return;
            }
            tree.prefetch_run(run.by_age.warmer());
            let (class, blocks, queue) = (run.class, run.len, run.queue);
            let next = table.bin(age);
            table.age(class, bin, next, blocks);
            self.unqueue(tree, number);
            self.remove_age(tree, number);
            if let Some(run) = tree.run_mut(number) {
                run.bin = u8::try_from(next).unwrap_or(run.bin);
            }
            if let Some(list) = self.ages.get_mut(next) {
                list.push_warmest(&mut ByAge(tree.runs_mut()), number);
            }
            let first = self.enqueue(tree, number, queue);
            self.offer(tree, table, first, now);
        }
    }

    /// The dead run that was used longest ago, about.
    pub(super) fn oldest_dead(&self) -> Option<u32> {
        let lists = self.dead.iter().rev();
        lists.map(|list| list.coldest()).find(|run| *run != NONE)
    }

    /// The first runs of all lists by age, oldest first.
    pub(super) fn oldest(&self) -> impl Iterator<Item = u32> + '_ {
        let lists = self.ages.iter().rev();
        lists.map(|list| list.coldest()).filter(|run| *run != NONE)
    }

    /// Looks at the first runs of all lists of a class of rows.
    pub(super) fn rebuild(
        &mut self,
        tree: &Tree,
        table: &Table,
        rows: u16,
        now: u32,
        budget: usize,
    ) {
        let leaves = self.leaves_mut(rows);
        leaves.budget = budget;
        let mut candidates = core::mem::take(&mut leaves.candidates).into_vec();
        candidates.clear();
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
        self.leaves.iter().map(of).sum()
    }
}

impl Leaves {
    /// The first run of a list as a candidate.
    pub(super) fn candidate(
        &self,
        tree: &Tree,
        table: &Table,
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
pub(super) fn score(table: &Table, run: &Run, now: u32) -> f32 {
    if table.is_ready() {
        let age = now.saturating_sub(run.last);
        table.index(run.class, age)
    } else {
        0.0
    }
}
