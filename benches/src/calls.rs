//! The calls that requests make on a policy, and what they took.

use core::fmt;
use std::time::Duration;

use kvstrata_core::eviction::EntryId;
use kvstrata_core::eviction::request::{RequestId, Tag};

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
    pub(crate) requests: Vec<Call>,
    /// Of each request all tags, then those of what was missing.
    pub(crate) tags: Vec<Tag>,
    /// Of each request what was there when it arrived, then what was when it ended.
    pub(crate) resident: Vec<EntryId>,
    pub(crate) inserted: Vec<(EntryId, Tag)>,
    pub(crate) counts: Counts,
}

/// The calls of one request: how many of each kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) id: RequestId,
    pub(crate) milliseconds: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) tags: usize,
    pub(crate) resident: usize,
    pub(crate) missing: usize,
    pub(crate) need: usize,
    pub(crate) inserted: usize,
    pub(crate) resident_at_end: usize,
}

/// Takes so many from the front.
pub(crate) fn take<'a, T>(all: &mut &'a [T], count: usize) -> &'a [T] {
    let (first, rest) = all.split_at(count);
    *all = rest;
    first
}

/// What replaying some requests took.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub(crate) processor: Duration,
    pub(crate) counts: Counts,
    pub(crate) memory_bytes: usize,
    pub(crate) entries: usize,
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
