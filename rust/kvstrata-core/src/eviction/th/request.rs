//! What a request does to the tree: it splits runs, takes those of its path over, and adds its own.

use super::Th;
use super::feature::{Kind, RequestFeatures};
use super::table::ClassNumber;
use super::tree::{Block, Run, Tick};
use crate::eviction::links::NONE;
use crate::eviction::request::{Context, Hint, Tag};
use crate::eviction::{Class, EntryId};

/// The table is refreshed after so many requests at least, after so many keys for each class, and
/// after such a part of all keys: what it costs is spread over them.
const REFRESH_REQUESTS: u32 = 16;
const REFRESH_CLASS_KEYS: usize = 2;
const REFRESH_SHARE: usize = 128;
/// Blocks of another's path that may be left over of a continuation, and the part of its own.
const REWRITTEN_BLOCKS: u32 = 4;
const REWRITTEN_SHARE: u32 = 5;
/// Keys of a request that are asked for before the first of them is looked for.
const AHEAD: usize = 32;
/// Free blocks that are asked for before they are used.
const FREE_AHEAD: u32 = 16;
/// Runs of another's path that are looked at.
const CHAIN_MAX: usize = 64;

/// A part of a request's path.
#[derive(Clone, Copy, Debug)]
struct Piece {
    run: u32,
    /// Blocks of the path up to its end.
    until: u32,
    /// Made by this request.
    new: bool,
}

/// Where a request met what was known.
#[derive(Clone, Copy, Debug)]
struct Meeting {
    kind: Kind,
    turn: u8,
    gap: Option<u32>,
}

impl RequestFeatures {
    /// Of a request of which nothing is known.
    pub(super) const fn unknown() -> Self {
        Self {
            turn: 1,
            new_tokens: None,
            prompt_tokens: None,
            kind: Kind::Fresh,
            gap: None,
            hint: Hint::None,
        }
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl Th {
    /// A request's one access: finds its path, takes over what is known of it and adds the rest.
    pub(super) fn request(&mut self, class: Class, tags: &[Tag], context: &Context) {
        if tags.is_empty() {
            return;
        }
        self.owner = self.owner.checked_add(1).unwrap_or(1);
        let mut path = core::mem::take(&mut self.path);
        self.find_known(tags, &mut path);
        if path.len() < tags.len() {
            self.prefetch_entries_of_first();
        }
        self.prefetch_runs_of(&path);
        let matched = path.len();
        let meeting = self.meet(&path, tags.len());
        let derived = context.prompt_tokens.map(|prompt| {
            let (new, all) = (tags.len() - matched, tags.len());
            let new = u64::from(prompt) * u64::from(count(new)) / u64::from(count(all));
            u32::try_from(new).unwrap_or(u32::MAX)
        });
        let features = RequestFeatures {
            turn: meeting.turn,
            new_tokens: context.new_tokens.or(derived),
            prompt_tokens: context.prompt_tokens,
            kind: meeting.kind,
            gap: meeting.gap,
            hint: context.hint,
        };
        let left_over = match meeting.kind {
            Kind::Rewritten => Kind::LeftByRewrite,
            _ => Kind::LeftByBranch,
        };
        let pieces = self.cut(class, tags, &path, left_over);
        self.path = path;
        self.claim(&pieces, count(tags.len()), &features);
        self.count_request(count(tags.len()));
        for piece in &pieces {
            if let Some(run) = self.tree.run(piece.run) {
                self.table.settle(run.class);
            }
        }
    }

    /// Finds the blocks of the keys that are known from the first on.
    fn find_known(&self, tags: &[Tag], path: &mut Vec<u32>) {
        path.clear();
        for tag in tags.iter().take(2 * AHEAD) {
            self.tree.prefetch_tag(*tag);
        }
        for run in self.queues.firsts() {
            self.tree.prefetch_run(run);
        }
        for tag in tags.iter().take(AHEAD) {
            self.tree.prefetch_block_of(*tag);
        }
        for run in self.queues.firsts() {
            self.tree.prefetch_end(run);
        }
        let mut guess = NONE;
        for (first, together) in tags.chunks(AHEAD).enumerate() {
            let next = (first + 1) * AHEAD;
            for tag in tags.iter().skip(next + AHEAD).take(AHEAD) {
                self.tree.prefetch_tag(*tag);
            }
            for tag in tags.iter().skip(next).take(AHEAD) {
                self.tree.prefetch_block_of(*tag);
            }
            for tag in together {
                let Some(found) = self.tree.find(*tag, guess.wrapping_add(1)) else {
                    return;
                };
                path.push(found);
                guess = found;
            }
        }
    }

    /// Fetches the entries that are the next victims; the blocks of most were fetched before.
    fn prefetch_entries_of_first(&self) {
        for run in self.queues.firsts() {
            let tail = self.tree.run(run).map_or(NONE, |run| run.live_tail);
            for entry in self.tree.residents_from(tail).take(AHEAD) {
                self.ledger.prefetch(entry);
            }
        }
    }

    /// Fetches the runs of a path, and then what is beside them: all will be looked at.
    fn prefetch_runs_of(&self, path: &[u32]) {
        for run in self.tree.runs_of(path) {
            self.tree.prefetch_run(run);
        }
        for run in self.tree.runs_of(path) {
            self.tree.prefetch_end(run);
            self.tree.prefetch_beside(run);
            self.queues.prefetch_place(&self.tree, run);
        }
    }

    /// How a request of `keys` keys comes upon what is there.
    fn meet(&self, path: &[u32], keys: usize) -> Meeting {
        let fresh = Meeting {
            kind: Kind::Fresh,
            turn: 1,
            gap: None,
        };
        let Some(number) = path.last().copied() else {
            return fresh;
        };
        let Some(block) = self.tree.block(number) else {
            return fresh;
        };
        let Some(run) = self.tree.run(block.run) else {
            return fresh;
        };
        let tail = self.tree.block(run.tail).map_or(0, |tail| tail.depth);
        let behind = tail.saturating_sub(block.depth);
        let fan_out = if behind == 0 { run.fan_out } else { 1 };
        let left = behind.saturating_add(run.beyond);
        let most = REWRITTEN_BLOCKS.max(count(keys) / REWRITTEN_SHARE);
        let kind = match fan_out {
            0 => Kind::Continuation,
            1 | 2 if left <= most => Kind::Rewritten,
            1 | 2 => Kind::Branch,
            _ => Kind::Shared,
        };
        let goes_on = matches!(kind, Kind::Continuation | Kind::Rewritten);
        Meeting {
            kind,
            turn: if goes_on {
                run.turn.saturating_add(1)
            } else {
                1
            },
            gap: goes_on.then(|| self.now.saturating_sub(run.last)),
        }
    }

    /// The run of a request's key, and its block.
    fn known(&self, tags: &[Tag], path: &[u32], at: usize) -> Option<(u32, u32)> {
        let block = match path.get(at) {
            Some(block) => *block,
            // Known although one before it is not.
            None if at > path.len() => self.tree.find(*tags.get(at)?, NONE)?,
            None => return None,
        };
        Some((self.tree.block(block)?.run, block))
    }

    /// Makes the path a row of whole runs, new ones where nothing is known. `path` are the blocks
    /// that are known from the first on.
    fn cut(&mut self, class: Class, tags: &[Tag], path: &[u32], left_over: Kind) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::with_capacity(8);
        let mut at = 0;
        while at < tags.len() {
            let parent = pieces.last().map_or(NONE, |piece| piece.run);
            let Some((run, first)) = self.known(tags, path, at) else {
                let rest = tags.get(at..).unwrap_or_default();
                let (run, taken) = self.grow(class, parent, rest);
                // A key that comes twice is counted once.
                at += taken.max(1);
                let until = count(at);
                pieces.extend(run.map(|run| Piece {
                    run,
                    until,
                    new: true,
                }));
                continue;
            };
            let (mut until, mut last, mut next) = (at + 1, first, None);
            while until < tags.len() {
                next = self.known(tags, path, until);
                match next {
                    Some((of, block)) if of == run => last = block,
                    _ => break,
                }
                until += 1;
            }
            let leaves = until == tags.len() || next.is_none();
            at = until;
            let known = pieces.iter().any(|piece| piece.run == run);
            let other = self.tree.run(run).is_none_or(|run| run.rows != class.0);
            if !known && !other {
                let run = self.isolate(run, first, last, leaves.then_some(left_over));
                self.adopt(parent, run, first);
                pieces.push(Piece {
                    run,
                    until: count(until),
                    new: false,
                });
            }
        }
        pieces
    }

    /// Adds a run of ghosts, up to the first key that is known; returns how many there are.
    fn grow(&mut self, class: Class, parent: u32, tags: &[Tag]) -> (Option<u32>, usize) {
        let run = self.tree.add_run(self.empty_run(0, class.0));
        let (mut before, mut length, mut taken) = (NONE, 0, 0);
        for (at, tag) in tags.iter().enumerate() {
            if let Some(ahead) = tags.get(at + 2 * AHEAD) {
                self.tree.prefetch_tag(*ahead);
            }
            if let Some(ahead) = tags.get(at + AHEAD) {
                self.tree.prefetch_block_of(*ahead);
            }
            self.tree.prefetch_free_block(FREE_AHEAD);
            let block = Block {
                tag: *tag,
                run,
                entry: NONE,
                parent: before,
                depth: length,
            };
            let Some(number) = self.tree.add_new_block(block) else {
                break;
            };
            before = number;
            length += 1;
            taken += 1;
        }
        if length == 0 {
            self.tree.free_run(run);
            return (None, 0);
        }
        if let Some(run) = self.tree.run_mut(run) {
            run.parent = parent;
            run.tail = before;
            run.len = length;
        }
        if let Some(above) = self.tree.run_mut(parent) {
            above.children = above.children.saturating_add(1);
            above.fan_out = above.fan_out.saturating_add(1);
            above.child = run;
        }
        (Some(run), taken)
    }

    /// Cuts what is before `first` and behind `last` off a run; returns the run between.
    /// The path of the run's owner from there on is left over, where it leaves that path.
    fn isolate(&mut self, run: u32, first: u32, last: u32, left_over: Option<Kind>) -> u32 {
        if let Some(before) = self.tree.before(first) {
            self.split(run, before);
        }
        let end = self.tree.run(run).map_or(last, |run| run.tail);
        if end != last {
            let head = self.split(run, last);
            if let Some(kind) = left_over {
                self.leave_behind(run, kind);
            }
            return head;
        }
        let next = self.tree.run(run).map(|own| (own.child, own.owner));
        if let Some(kind) = left_over
            && let Some((child, owner)) = next
            && self.tree.run(child).is_some_and(|run| run.owner == owner)
        {
            self.leave_behind(child, kind);
        }
        run
    }

    /// Makes the blocks of a run up to `last` a run of their own, above the rest; returns it.
    fn split(&mut self, run: u32, last: u32) -> u32 {
        let Some(lower) = self.tree.run(run).copied() else {
            return run;
        };
        let head = self.tree.add_run(Run {
            tail: last,
            live_tail: NONE,
            len: 0,
            live: 0,
            children: 1,
            live_children: 0,
            child: run,
            fan_out: 1,
            queue: super::Queue::None,
            parked: false,
            ..lower
        });
        let (mut length, mut live, mut live_tail) = (0, 0, NONE);
        let mut at = Some(last);
        while let Some(number) = at {
            at = self.tree.before(number);
            let Some(block) = self.tree.block_mut(number) else {
                break;
            };
            block.run = head;
            length += 1;
            if block.entry != NONE {
                live += 1;
                live_tail = if live == 1 { number } else { live_tail };
            }
        }
        self.queues.unqueue(&mut self.tree, run);
        if let Some(rest) = self.tree.run_mut(run) {
            rest.len = rest.len.saturating_sub(length);
            rest.live = rest.live.saturating_sub(live);
            rest.parent = head;
            rest.parked = false;
            if rest.live == 0 {
                rest.live_tail = NONE;
            }
        }
        let (below_live, below) = self
            .tree
            .run(run)
            .map_or((false, 0), |rest| (rest.is_live(), rest.len));
        if let Some(head) = self.tree.run_mut(head) {
            head.len = length;
            head.live = live;
            head.live_tail = live_tail;
            head.live_children = u32::from(below_live);
            head.beyond = lower.beyond.saturating_add(below);
        }
        if let Some(above) = self.tree.run_mut(lower.parent)
            && above.child == run
        {
            above.child = head;
        }
        self.queues.push_beside(&mut self.tree, run, head);
        self.requeue(run);
        self.requeue(head);
        head
    }

    /// Ties a run that was found without one to the run before it.
    fn adopt(&mut self, parent: u32, run: u32, first: u32) {
        let Some(own) = self.tree.run(run).copied() else {
            return;
        };
        if own.parent != NONE || parent == NONE || self.tree.before(first).is_some() {
            return;
        }
        let mut above = parent;
        while let Some(next) = self.tree.run(above) {
            if above == run {
                return;
            }
            above = next.parent;
        }
        if let Some(own) = self.tree.run_mut(run) {
            own.parent = parent;
        }
        if let Some(above) = self.tree.run_mut(parent) {
            above.children = above.children.saturating_add(1);
            above.fan_out = above.fan_out.saturating_add(1);
        }
        if own.is_live() {
            self.change_live(run, true);
        } else {
            self.requeue(parent);
        }
    }

    /// Gives what is left of another's path the class of left-overs.
    fn leave_behind(&mut self, first: u32, kind: Kind) {
        let owner = self.tree.run(first).map(|run| run.owner);
        let mut number = first;
        for _ in 0..CHAIN_MAX {
            let Some(run) = self.tree.run(number).copied() else {
                return;
            };
            if Some(run.owner) != owner {
                return;
            }
            if let Some(features) = self.table.features(run.class) {
                let class = self.table.class(features.with_kind(kind));
                self.reclassify(number, class);
            }
            number = run.child;
        }
    }

    /// Gives a run another class at its age.
    fn reclassify(&mut self, number: u32, class: ClassNumber) {
        let Some(run) = self.tree.run(number).copied() else {
            return;
        };
        if run.class == class {
            return;
        }
        self.table.leave(run.class, usize::from(run.bin), run.len);
        self.table.enter(class, usize::from(run.bin), run.len);
        self.queues.unqueue(&mut self.tree, number);
        if let Some(run) = self.tree.run_mut(number) {
            run.class = class;
        }
        self.requeue(number);
    }

    /// Makes a path the request's own: it was used just now.
    fn claim(&mut self, pieces: &[Piece], length: u32, features: &RequestFeatures) {
        let turn = features.turn;
        for piece in pieces {
            let Some(run) = self.tree.run(piece.run).copied() else {
                continue;
            };
            if let Some(block) = self.tree.block(run.live_tail) {
                self.ledger.prefetch(EntryId(block.entry));
            }
            let frequency = if piece.new {
                1
            } else {
                let age = self.now.saturating_sub(run.last);
                self.table
                    .hit(run.class, usize::from(run.bin), age, run.len);
                self.queues.unqueue(&mut self.tree, piece.run);
                self.queues.remove_age(&self.tree, piece.run);
                run.frequency.saturating_add(1)
            };
            let class = self.table.class(features.of_run(frequency));
            self.table.begin(class, run.len);
            let (now, owner) = (self.now, self.owner);
            if let Some(run) = self.tree.run_mut(piece.run) {
                run.class = class;
                run.frequency = frequency;
                run.last = now;
                run.owner = owner;
                run.turn = turn;
                run.parked = false;
                run.beyond = length.saturating_sub(piece.until);
            }
        }
        let above = pieces.iter().map(|piece| piece.run).chain([NONE]);
        for pair in above.collect::<Vec<u32>>().windows(2) {
            if let [number, child] = *pair
                && let Some(run) = self.tree.run_mut(number)
                && child != NONE
            {
                run.child = child;
            }
        }
        for piece in pieces.iter().rev() {
            self.queues.push_youngest(&mut self.tree, piece.run);
            self.requeue(piece.run);
            self.note_access(piece);
        }
    }

    /// Notes the access to the resident blocks of a run, for the order of containers.
    fn note_access(&mut self, piece: &Piece) {
        let Some(run) = self.tree.run(piece.run).copied() else {
            return;
        };
        if piece.new || run.live == 0 {
            return;
        }
        if !self.ledger.has_containers() {
            let entry = self.tree.block(run.live_tail).map(|block| block.entry);
            self.ledger.accessed(EntryId(entry.unwrap_or(NONE)));
            let tick = self.ledger.now();
            if let Some(run) = self.tree.run_mut(piece.run) {
                run.tick = Tick::of(tick);
            }
            return;
        }
        let mut at = self.tree.resident_from(run.live_tail);
        while let Some(number) = at {
            let Some(block) = self.tree.block(number) else {
                break;
            };
            self.ledger.accessed(EntryId(block.entry));
            let before = self.tree.before(number);
            at = before.and_then(|number| self.tree.resident_from(number));
        }
        let tick = self.ledger.now();
        if let Some(run) = self.tree.run_mut(piece.run) {
            run.tick = Tick::of(tick);
        }
    }

    /// Refreshes the table from time to time.
    fn count_request(&mut self, blocks: u32) {
        self.requests = self.requests.saturating_add(1);
        self.fresh_blocks = self.fresh_blocks.saturating_add(blocks);
        let by_classes = self.table.len().saturating_mul(REFRESH_CLASS_KEYS);
        let blocks_min = count(by_classes.max(self.tree.len() / REFRESH_SHARE));
        if self.requests >= REFRESH_REQUESTS && self.fresh_blocks >= blocks_min {
            self.fresh_blocks = 0;
            self.queues
                .advance(&mut self.tree, &mut self.table, self.now);
            self.table.refresh();
            self.queues.invalidate();
            self.requests = 0;
        }
    }
}
