//! The radix tree of keys that are known: blocks, and the runs they form.
//!
//! A block is a key of the directory, resident or a ghost. A run is an edge of the tree: blocks in
//! a row that the same requests touched, owned by the last of them. A request that leaves a run
//! half-way splits it.

use super::table::ClassNumber;
use super::vacant::Vacant;
use crate::chunked::{Chunked, LARGE_BITS};
use crate::eviction::EntryId;
use crate::eviction::by_tag::ByTag;
use crate::eviction::links::{Links, NONE};
use crate::eviction::order::{Entries, Place};
use crate::eviction::request::Tag;
use crate::sys::prefetch::prefetch;

/// Ghosts of a run that are asked for before they go.
const GHOSTS_AHEAD: u32 = 32;

/// Blocks of a run that are asked for before the last one is looked at.
const BLOCKS_AHEAD: u32 = 32;
/// Blocks of which the first and the last byte lie in three lines of the processor's caches at most.
const BLOCKS_OF_LINE: u32 = 2;

/// Runs that are in one piece of memory, as a power of two.
const RUN_BITS: u32 = 16;

/// A key: 24 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) tag: Tag,
    /// Its run; `NONE` if the block is free.
    pub(super) run: u32,
    /// Its handle, or `NONE` for a ghost.
    pub(super) entry: u32,
    /// The key before it.
    pub(super) parent: u32,
    /// Grows along a run.
    pub(super) depth: u32,
}

/// The lists of runs of one class and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// In none.
    None,
    /// Leaves: victims.
    Leaf,
    /// Nothing but ghosts, nothing below: to be forgotten.
    Dead,
}

/// A tick of the policy, of 48 bits: hundreds of millions of accesses a second for a week.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tick([u16; 3]);

impl Tick {
    pub(super) fn of(tick: u64) -> Self {
        let part = |shift: u32| u16::try_from(tick >> shift & 0xffff).unwrap_or(0);
        Self([part(0), part(16), part(32)])
    }

    pub(super) fn number(self) -> u64 {
        let [low, middle, high] = self.0.map(u64::from);
        high << 32 | middle << 16 | low
    }
}

/// An edge: 72 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Tick of the policy of the last access.
    pub(super) tick: Tick,
    /// Time of the last access.
    pub(super) last: u32,
    /// The run before it.
    pub(super) parent: u32,
    /// The child touched last.
    pub(super) child: u32,
    /// Its deepest block.
    pub(super) tail: u32,
    /// Its deepest resident block.
    pub(super) live_tail: u32,
    /// Number of blocks, of resident ones, and of those that may go.
    pub(super) len: u32,
    pub(super) live: u32,
    /// Children, and children below which anything is resident.
    pub(super) children: u32,
    pub(super) live_children: u32,
    /// Blocks of its owner's path behind its end.
    pub(super) beyond: u32,
    /// Its owner.
    pub(super) owner: u32,
    /// Its place among all runs of its age.
    pub(super) by_age: Place,
    /// Its place among the leaves of its class and age.
    pub(super) by_class: Links,
    pub(super) class: ClassNumber,
    /// The class of rows.
    pub(super) rows: u16,
    /// Requests that touched it.
    pub(super) frequency: u8,
    /// Children ever seen.
    pub(super) fan_out: u8,
    pub(super) turn: u8,
    /// Bin of its age.
    pub(super) bin: u8,
    /// Which list of its class and age it is in.
    pub(super) queue: Queue,
    /// Whether its deepest resident block is pinned: nothing of it goes until that is over.
    pub(super) parked: bool,
}

const _: () = assert!(size_of::<Run>() == 72);

impl Run {
    /// Whether anything of it, or below it, is resident.
    pub(super) const fn is_live(&self) -> bool {
        self.live > 0 || self.live_children > 0
    }

    /// Whether its deepest resident block can go without making others useless.
    pub(super) const fn is_leaf(&self) -> bool {
        self.live > 0 && self.live_children == 0
    }
}

/// Runs by number.
pub(super) type Runs = Chunked<Run, RUN_BITS>;

impl Entries for Runs {
    fn moved(&mut self, number: u32, place: Place) {
        if let Some(run) = self.get_mut(number) {
            run.by_age = place;
        }
    }
}

/// Blocks and runs by number.
#[derive(Debug, Default)]
pub(super) struct Tree {
    blocks: Chunked<Block, LARGE_BITS>,
    free_blocks: Vacant,
    runs: Runs,
    free_runs: Vec<u32>,
    by_tag: ByTag,
    used: usize,
}

fn at(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

fn tag_at(blocks: &Chunked<Block, LARGE_BITS>, number: u32) -> Tag {
    blocks.get(number).map_or(Tag(0), |block| block.tag)
}

impl Tree {
    pub(super) fn block(&self, number: u32) -> Option<&Block> {
        self.blocks.get(number)
    }

    pub(super) fn block_mut(&mut self, number: u32) -> Option<&mut Block> {
        self.blocks.get_mut(number)
    }

    pub(super) fn run(&self, number: u32) -> Option<&Run> {
        self.runs.get(number)
    }

    pub(super) fn run_mut(&mut self, number: u32) -> Option<&mut Run> {
        self.runs.get_mut(number)
    }

    pub(super) const fn runs_mut(&mut self) -> &mut Runs {
        &mut self.runs
    }

    /// Number of blocks in use.
    pub(super) const fn len(&self) -> usize {
        self.used
    }

    /// The block of a tag. Blocks of a request lie side by side as a rule: the one after the last
    /// found is looked at first.
    pub(super) fn find(&self, tag: Tag, guess: u32) -> Option<u32> {
        if self.has_at(tag, guess) {
            return Some(guess);
        }
        let same = |number| self.blocks.get(number).is_some_and(|b| b.tag == tag);
        self.by_tag.find(tag, same)
    }

    /// Whether the block of a tag is this one.
    pub(super) fn has_at(&self, tag: Tag, number: u32) -> bool {
        let block = self.blocks.get(number);
        block.is_some_and(|block| block.tag == tag && block.run != NONE)
    }

    /// Fetches the place of a tag: it will be looked for soon.
    pub(super) fn prefetch_tag(&self, tag: Tag) {
        self.by_tag.prefetch(tag);
    }

    /// Fetches the block that a tag may have; its place was fetched before.
    pub(super) fn prefetch_block_of(&self, tag: Tag) {
        if let Some(number) = self.by_tag.guess(tag) {
            prefetch(self.blocks.get(number));
        }
    }

    /// Fetches the end of a run that was fetched before, and the run that comes next in its list.
    pub(super) fn prefetch_end(&self, number: u32) {
        if let Some(run) = self.runs.get(number) {
            prefetch(self.blocks.get(run.tail));
            self.prefetch_up_to(run.live_tail, run.live);
            prefetch(self.runs.get(run.by_class.warmer()));
            prefetch(self.runs.get(run.parent));
        }
    }

    /// Fetches a block and those before it, as far as they lie side by side.
    fn prefetch_up_to(&self, number: u32, count: u32) {
        let mut at = number;
        for _ in 0..count.min(BLOCKS_AHEAD).div_ceil(BLOCKS_OF_LINE) {
            prefetch(self.blocks.get(at));
            at = at.wrapping_sub(BLOCKS_OF_LINE);
        }
    }

    /// Fetches the neighbours of a run in the list of its class and age.
    pub(super) fn prefetch_beside(&self, number: u32) {
        if let Some(run) = self.runs.get(number) {
            prefetch(self.runs.get(run.by_class.colder()));
            prefetch(self.runs.get(run.by_class.warmer()));
        }
    }

    /// Fetches a block that is about to be made, if nothing stands between.
    pub(super) fn prefetch_free_block(&self, after: u32) {
        let number = self.free_blocks.peek().saturating_add(after);
        prefetch(self.blocks.get(number));
    }

    /// The runs of a path, in order.
    pub(super) fn runs_of<'a>(&'a self, path: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let mut before = NONE;
        path.iter().filter_map(move |number| {
            let run = self.blocks.get(*number)?.run;
            let is_next = core::mem::replace(&mut before, run) != run;
            is_next.then_some(run)
        })
    }

    /// Fetches a run.
    pub(super) fn prefetch_run(&self, number: u32) {
        prefetch(self.runs.get(number));
    }

    /// Makes a block; it is found by its tag if `named`.
    pub(super) fn add_block(&mut self, block: Block, named: bool) -> u32 {
        debug_assert!(
            !named || self.find(block.tag, NONE).is_none(),
            "one block a tag"
        );
        let number = self.put_block(block);
        if named {
            let blocks = &self.blocks;
            let tag_of = |number| tag_at(blocks, number);
            let ask = |number| prefetch(blocks.get(number));
            self.by_tag.insert(block.tag, number, tag_of, ask);
        }
        number
    }

    /// Makes a block that is found by its tag, unless the tag has one.
    pub(super) fn add_new_block(&mut self, block: Block) -> Option<u32> {
        let known = !self.by_tag.is_new(block.tag) && self.find(block.tag, NONE).is_some();
        (!known).then(|| self.add_block(block, true))
    }

    fn put_block(&mut self, block: Block) -> u32 {
        self.used += 1;
        if let Some(number) = self.free_blocks.take() {
            if let Some(place) = self.blocks.get_mut(number) {
                *place = block;
            }
            return number;
        }
        let number = u32::try_from(self.blocks.len()).unwrap_or(NONE);
        self.blocks.push(block);
        number
    }

    /// Lets a block go.
    pub(super) fn free_block(&mut self, number: u32) {
        let Some(block) = self.blocks.get_mut(number) else {
            return;
        };
        let tag = block.tag;
        block.run = NONE;
        block.entry = NONE;
        self.by_tag.remove(tag, number);
        self.free_blocks.put(number);
        self.used = self.used.saturating_sub(1);
    }

    /// Makes a run.
    pub(super) fn add_run(&mut self, run: Run) -> u32 {
        if let Some(number) = self.free_runs.pop() {
            if let Some(place) = self.runs.get_mut(number) {
                *place = run;
            }
            return number;
        }
        let number = u32::try_from(self.runs.len()).unwrap_or(NONE);
        self.runs.push(run);
        number
    }

    /// Lets a run go that has no blocks.
    pub(super) fn free_run(&mut self, number: u32) {
        self.free_runs.push(number);
    }

    /// The block before another in the same run.
    pub(super) fn before(&self, number: u32) -> Option<u32> {
        let block = self.blocks.get(number)?;
        let parent = self.blocks.get(block.parent)?;
        (parent.run == block.run && parent.depth < block.depth).then_some(block.parent)
    }

    /// The tags from a block on upwards in its run, up to another one or to its head.
    pub(super) fn tags_from(&self, number: u32, end: u32) -> impl Iterator<Item = Tag> + '_ {
        let next = move |at: &u32| self.before(*at);
        let blocks = core::iter::successors(Some(number), next);
        let blocks = blocks.take_while(move |at| *at != end);
        blocks.map(|at| tag_at(&self.blocks, at))
    }

    /// The deepest resident block from `number` on upwards in its run.
    pub(super) fn resident_from(&self, number: u32) -> Option<u32> {
        let mut at = number;
        loop {
            if self.blocks.get(at)?.entry != NONE {
                return Some(at);
            }
            at = self.before(at)?;
        }
    }

    /// The entries of the resident blocks from `number` on upwards in its run.
    pub(super) fn residents_from(&self, number: u32) -> impl Iterator<Item = EntryId> + '_ {
        let next = |at: &u32| self.resident_from(self.before(*at)?);
        let blocks = core::iter::successors(self.resident_from(number), next);
        blocks.filter_map(|at| self.blocks.get(at).map(|block| EntryId(block.entry)))
    }

    /// Fetches the places of the tags that go when ghosts at the end of a run do, or of the first of
    /// them.
    pub(super) fn prefetch_ghosts(&self, number: u32) {
        if let Some(run) = self.runs.get(number) {
            for tag in self
                .tags_from(run.tail, run.live_tail)
                .take(at(GHOSTS_AHEAD))
            {
                self.prefetch_tag(tag);
            }
            self.prefetch_ghost_end(run.by_class.warmer());
        }
    }

    /// Fetches the places of the tags that [`Tree::prefetch_ghosts`] left out.
    pub(super) fn prefetch_more_ghosts(&self, run: &Run) {
        if run.len.saturating_sub(run.live) > GHOSTS_AHEAD {
            let tags = self.tags_from(run.tail, run.live_tail);
            for tag in tags.skip(at(GHOSTS_AHEAD)) {
                self.prefetch_tag(tag);
            }
        }
    }

    /// Fetches the ghosts at the end of a run that was fetched before, and the run that comes next.
    fn prefetch_ghost_end(&self, number: u32) {
        if let Some(run) = self.runs.get(number) {
            self.prefetch_up_to(run.tail, run.len.saturating_sub(run.live));
            prefetch(self.runs.get(run.by_class.warmer()));
            prefetch(self.runs.get(run.parent));
        }
    }

    /// The same of the run that comes next in its list.
    pub(super) fn prefetch_ghosts_beside(&self, number: u32) {
        if let Some(run) = self.runs.get(number) {
            self.prefetch_ghosts(run.by_class.warmer());
        }
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.blocks.memory_bytes()
            + self.runs.memory_bytes()
            + self.free_blocks.memory_bytes()
            + self.free_runs.capacity() * size_of::<u32>()
            + self.by_tag.memory_bytes()
    }
}
