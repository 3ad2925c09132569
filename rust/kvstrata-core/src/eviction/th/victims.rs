//! The search for victims: leaves by their index, each from its end.

use std::collections::BinaryHeap;

use hashbrown::{HashMap, HashSet};

use super::Th;
use super::queues::{Candidate, score};
use crate::eviction::links::NONE;
use crate::eviction::{Class, EntryId};

/// At least so many victims are taken before all candidates are looked at anew, and the part of
/// the resident entries that may be.
const BUDGET_MIN: usize = 16;
const BUDGET_SHARE: usize = 64;

/// One search.
#[derive(Default)]
struct Search {
    chosen: Vec<EntryId>,
    /// Runs that come next if those before them go.
    later: BinaryHeap<Candidate>,
    /// Candidates that stay what they are unless their entries are removed.
    passed: Vec<Candidate>,
    seen: HashSet<u32>,
    /// Children of a run that would not be live any more.
    lost: HashMap<u32, u32>,
    /// Runs whose end is pinned.
    parked: Vec<u32>,
}

impl Th {
    /// The next victims of a class of rows, at most `need`, whose index is below `ceiling`.
    pub(super) fn choose(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        ceiling: f32,
    ) -> Vec<EntryId> {
        let rows = class.0;
        let budget = (self.ledger.len() / BUDGET_SHARE).max(BUDGET_MIN);
        let mut search = Search::default();
        let mut fresh = false;
        if self.queues.leaves_mut(rows).budget == 0 {
            self.look_anew(rows, budget);
            fresh = true;
        }
        while search.chosen.len() < need {
            let first = &mut self.queues.leaves_mut(rows).candidates;
            let next = if search.later.peek() > first.peek() {
                search.later.pop()
            } else {
                first.pop()
            };
            let Some(candidate) = next else {
                if fresh {
                    break;
                }
                self.look_anew(rows, budget);
                fresh = true;
                continue;
            };
            if !self.is_current(&candidate, rows, &search) {
                continue;
            }
            if !candidate.later {
                search.passed.push(candidate);
            }
            if candidate.score >= ceiling {
                break;
            }
            search.seen.insert(candidate.run);
            self.take_from(&candidate, need, protected, &mut search);
        }
        let leaves = self.queues.leaves_mut(rows);
        leaves.candidates.extend(search.passed);
        for run in search.parked {
            if let Some(run) = self.tree.run_mut(run) {
                run.parked = true;
            }
            self.requeue(run);
        }
        search.chosen
    }

    /// Looks at all candidates, at their ages.
    fn look_anew(&mut self, rows: u16, budget: usize) {
        self.queues
            .advance(&mut self.tree, &mut self.table, self.now);
        self.queues
            .rebuild(&self.tree, &mut self.table, rows, self.now, budget);
    }

    /// Whether a candidate is what it was when it was found. One that is not is followed by what
    /// has taken its place.
    fn is_current(&mut self, candidate: &Candidate, rows: u16, search: &Search) -> bool {
        if search.seen.contains(&candidate.run) {
            return false;
        }
        if candidate.later {
            return true;
        }
        let leaves = self.queues.leaves_mut(rows);
        if leaves.first(candidate.class, candidate.bin) == candidate.run {
            return true;
        }
        let (class, bin) = (candidate.class, candidate.bin);
        let next = leaves.candidate(&self.tree, &mut self.table, class, bin, self.now);
        if let Some(next) = next.filter(|next| !search.seen.contains(&next.run)) {
            leaves.candidates.push(next);
        }
        false
    }

    /// Takes entries from the end of a run.
    fn take_from(
        &mut self,
        candidate: &Candidate,
        need: usize,
        protected: &dyn Fn(EntryId) -> bool,
        search: &mut Search,
    ) {
        let Some(run) = self.tree.run(candidate.run).copied() else {
            return;
        };
        // All are asked for before the first of them is looked at.
        let most = need - search.chosen.len();
        let mut entries = core::mem::take(&mut self.ends);
        entries.clear();
        entries.extend(self.tree.residents_from(run.live_tail).take(most));
        for entry in &entries {
            self.ledger.prefetch(*entry);
        }
        let mut left = run.live;
        for entry in entries.iter().copied() {
            self.visited = self.visited.saturating_add(1);
            if !self.ledger.is_evictable(entry) {
                search.parked.push(candidate.run);
                break;
            }
            if protected(entry) {
                break;
            }
            search.chosen.push(entry);
            left = left.saturating_sub(1);
        }
        self.ends = entries;
        if search.chosen.len() == need && left > 0 {
            return;
        }
        if run.queue == super::tree::Queue::Leaf {
            self.push_later(run.by_class.warmer(), search);
        }
        if left == 0 {
            self.push_parent(run.parent, search);
        }
    }

    /// Adds a run that comes next if those before it go.
    fn push_later(&mut self, number: u32, search: &mut Search) {
        let Some(run) = self.tree.run(number) else {
            return;
        };
        let later = Candidate {
            score: score(&mut self.table, run, self.now),
            last: run.last,
            run: number,
            later: true,
            class: run.class,
            bin: run.bin,
        };
        self.tree.prefetch_end(number);
        search.later.push(later);
    }

    /// Adds the run above one that would go, if it would be a leaf then.
    fn push_parent(&mut self, parent: u32, search: &mut Search) {
        let mut number = parent;
        while let Some(run) = self.tree.run(number).copied() {
            let lost = search.lost.entry(number).or_insert(0);
            *lost += 1;
            if *lost < run.live_children {
                return;
            }
            if run.live > 0 {
                if !run.parked {
                    self.push_later(number, search);
                }
                return;
            }
            number = run.parent;
        }
    }

    /// All victims, whatever they are worth: what remains when every leaf's end is in use or
    /// protected. Looks at every entry.
    pub(super) fn choose_anywhere(
        &mut self,
        need: usize,
        class: Class,
        protected: &dyn Fn(EntryId) -> bool,
        chosen: &mut Vec<EntryId>,
    ) {
        let taken: HashSet<EntryId> = chosen.iter().copied().collect();
        let mut others: Vec<(u32, core::cmp::Reverse<u32>, EntryId)> = Vec::new();
        for entry in self.ledger.entries() {
            self.visited = self.visited.saturating_add(1);
            if self.ledger.is_evictable(entry)
                && self.ledger.class(entry) == Some(class)
                && !taken.contains(&entry)
                && !protected(entry)
            {
                let node = self.ledger.node(entry).unwrap_or(NONE);
                let block = self.tree.block(node);
                let depth = block.map_or(0, |block| block.depth);
                let run = block.and_then(|block| self.tree.run(block.run));
                let last = run.map_or(0, |run| run.last);
                others.push((last, core::cmp::Reverse(depth), entry));
            }
        }
        others.sort_unstable();
        let missing = need.saturating_sub(chosen.len());
        chosen.extend(others.into_iter().take(missing).map(|(_, _, entry)| entry));
    }
}
