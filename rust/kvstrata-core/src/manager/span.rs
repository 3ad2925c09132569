//! What of the rows that a request asked for in a step it would load.
//!
//! A scheduler of vLLM's asks group by group (`OffloadingConnectorScheduler._lookup_complete_chunks`
//! in `vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`). A group that needs
//! every row is asked from the front to the first miss; one that needs a window is asked from the
//! back until so many rows in a row are there. A group may be asked again when another has made the
//! hit shorter. While a row is on its way no answer shortens anything, so that groups are asked for
//! more than all of them can agree on.

use crate::key::GroupId;

/// One answer, in the order of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The group of the key.
    pub group: GroupId,
    /// The token that the key's chunk ends with, where that is known.
    pub position: Option<u64>,
    /// Whether the row is there or can be had.
    pub found: bool,
}

/// What the groups agree on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The token that ends it; 0 where there is nothing.
    pub end: u64,
    /// Positions of the items that belong to it, in ascending order.
    pub members: Vec<usize>,
    /// Those of them whose group was asked from the back.
    pub windows: Vec<usize>,
}

/// Items of one group that were asked one after the other, from the front or from the back.
#[derive(Debug)]
struct Pass {
    group: GroupId,
    items: Vec<usize>,
    last: Option<u64>,
    descends: Option<bool>,
    /// Whether misses, whose places are not known, came after `last`.
    missed: bool,
}

/// The span of the items. `step` says how many tokens a group's chunk has; a key that ends
/// elsewhere is the tail of a recurrent group, asked for all groups boundary by boundary.
pub fn agreed(items: &[Item], step: &dyn Fn(GroupId) -> Option<u64>) -> Span {
    let is_tail = |item: &Item| match (item.position, step(item.group)) {
        (Some(position), Some(tokens)) => tokens > 0 && position % tokens != 0,
        _ => false,
    };
    let mut last: Vec<Pass> = Vec::new();
    let mut before: Option<GroupId> = None;
    for (at, item) in items.iter().enumerate() {
        if is_tail(item) {
            continue;
        }
        let tokens = step(item.group).unwrap_or(u64::MAX);
        let known = last.iter().position(|pass| pass.group == item.group);
        let goes_on = before == Some(item.group);
        before = Some(item.group);
        let pass = match known.and_then(|number| last.get_mut(number)) {
            Some(pass) if goes_on && pass.takes(item, tokens) => pass,
            Some(pass) => {
                *pass = Pass::of(item.group);
                pass
            }
            None => {
                last.push(Pass::of(item.group));
                let Some(pass) = last.last_mut() else {
                    continue;
                };
                pass
            }
        };
        pass.add(at, item);
    }
    let mut span = join(&last, items);
    if let Some(tails) = best_tail(items, &is_tail) {
        span.members.extend(tails);
        span.members.sort_unstable();
        span.members.dedup();
    }
    span
}

impl Pass {
    fn of(group: GroupId) -> Self {
        Self {
            group,
            items: Vec::new(),
            last: None,
            descends: None,
            missed: false,
        }
    }

    /// Whether an item goes on in the direction of the pass, next to the one before.
    fn takes(&self, item: &Item, step: u64) -> bool {
        let (Some(last), Some(position)) = (self.last, item.position) else {
            return true;
        };
        let turns = self.descends.is_some_and(|down| down != (position < last));
        position != last && !turns && (self.missed || position.abs_diff(last) <= step)
    }

    fn add(&mut self, at: usize, item: &Item) {
        if let (Some(last), Some(position)) = (self.last, item.position)
            && self.descends.is_none()
        {
            self.descends = Some(position < last);
        }
        if item.position.is_some() {
            self.last = item.position;
        }
        self.missed = !item.found;
        self.items.push(at);
    }

    /// The found items that the group's answer is made of.
    fn run(&self, items: &[Item]) -> Vec<usize> {
        let found = |at: &usize| items.get(*at).is_some_and(|item| item.found);
        if self.is_window(items) {
            let mut run: Vec<usize> = self.items.iter().rev().copied().take_while(found).collect();
            run.reverse();
            return run;
        }
        self.items.iter().copied().take_while(found).collect()
    }

    /// Whether the group was asked from the back. So was one found item behind misses: from the
    /// front a miss ends the asking.
    fn is_window(&self, items: &[Item]) -> bool {
        let first = self.items.first().and_then(|at| items.get(*at));
        self.descends
            .unwrap_or_else(|| first.is_some_and(|one| !one.found))
    }
}

fn join(passes: &[Pass], items: &[Item]) -> Span {
    let position = |at: &usize| items.get(*at).and_then(|item| item.position);
    let runs: Vec<(bool, Vec<usize>)> = passes
        .iter()
        .map(|pass| (pass.is_window(items), pass.run(items)))
        .collect();
    let end = runs
        .iter()
        .map(|(_, run)| run.iter().filter_map(position).max().unwrap_or(0))
        .min()
        .unwrap_or(0);
    let mut span = Span {
        end,
        ..Span::default()
    };
    for (is_window, run) in runs {
        for at in run {
            if position(&at).is_none_or(|position| position <= end) {
                span.members.push(at);
                if is_window {
                    span.windows.push(at);
                }
            }
        }
    }
    span.members.sort_unstable();
    span.windows.sort_unstable();
    span
}

/// The items of the last boundary that all groups have a tail at.
fn best_tail(items: &[Item], is_tail: &dyn Fn(&Item) -> bool) -> Option<Vec<usize>> {
    let mut groups: Vec<GroupId> = items.iter().map(|item| item.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let mut best: Option<(u64, Vec<usize>)> = None;
    let tails = items.iter().enumerate().filter(|(_, item)| is_tail(item));
    let mut here: Vec<(u64, Vec<usize>, bool)> = Vec::new();
    for (at, item) in tails {
        let Some(position) = item.position else {
            continue;
        };
        match here.iter_mut().find(|(other, ..)| *other == position) {
            Some((_, members, whole)) => {
                members.push(at);
                *whole &= item.found;
            }
            None => here.push((position, vec![at], item.found)),
        }
    }
    for (position, members, whole) in here {
        let is_later = best.as_ref().is_none_or(|(other, _)| *other < position);
        if whole && members.len() >= groups.len() && is_later {
            best = Some((position, members));
        }
    }
    best.map(|(_, members)| members)
}
