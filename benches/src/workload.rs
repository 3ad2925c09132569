//! The requests of a trace, as many copies of it as fill a tier.

#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use kvstrata_core::eviction::request::Tag;
use kvstrata_core::simulate::trace::{Trace, tag};

use crate::blocks::{at, number};

/// A tier holds one in so many of all blocks.
const SHARE: usize = 4;
/// A request of a trace.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) milliseconds: u64,
    pub(crate) prompt_tokens: u32,
    /// Its blocks in [`Workload::blocks`].
    pub(crate) first: usize,
    pub(crate) end: usize,
}

/// Copies of a trace, interleaved.
#[derive(Debug)]
pub struct Workload {
    pub(crate) requests: Vec<Request>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) tags: Vec<Tag>,
    pub(crate) unique: usize,
    /// Milliseconds from the first request to the last.
    pub(crate) span: u64,
    /// Whether the blocks of a round are those of the round before.
    pub(crate) is_repeated: bool,
}

impl Workload {
    /// So many copies of a trace of this project that a tier of `entries` blocks holds a quarter.
    pub fn of_trace(name: &str, entries: usize) -> Self {
        let path = format!("{}/traces/{name}.jsonl.gz", env!("CARGO_MANIFEST_DIR"));
        let text = std::process::Command::new("gzip")
            .arg("-dc")
            .arg(path)
            .output();
        let trace = Trace::parse(&text.expect("gzip is there").stdout).expect("a trace");
        let copies =
            (entries * SHARE).div_ceil(usize::try_from(trace.unique_blocks).expect("small"));
        let mut own = Self {
            requests: Vec::new(),
            blocks: Vec::new(),
            tags: Vec::new(),
            unique: copies * usize::try_from(trace.unique_blocks).expect("small"),
            span: trace.requests.last().map_or(0, |last| last.milliseconds),
            is_repeated: false,
        };
        for request in &trace.requests {
            for copy in 0..number(copies) {
                let first = own.blocks.len();
                own.blocks.extend(
                    request
                        .blocks()
                        .map(|block| block + copy * trace.unique_blocks),
                );
                own.requests.push(Request {
                    milliseconds: request.milliseconds,
                    prompt_tokens: request.prompt_tokens,
                    first,
                    end: own.blocks.len(),
                });
            }
        }
        own.tags = own.blocks.iter().map(|block| tag(*block)).collect();
        own
    }

    /// The same requests for whose blocks a tier of this many has room, in the order of their first use:
    /// once it has seen them, it finds all there is.
    #[must_use]
    pub fn that_fit(mut self, entries: usize) -> Self {
        let mut seen = vec![false; self.unique];
        let mut room = entries;
        let blocks = &self.blocks;
        self.requests.retain(|request| {
            let own = &blocks[request.first..request.end];
            let mut new: Vec<u32> = own.iter().copied().filter(|one| !seen[at(*one)]).collect();
            new.sort_unstable();
            new.dedup();
            let fits = new.len() <= room;
            if fits {
                room -= new.len();
                for one in &new {
                    seen[at(*one)] = true;
                }
            }
            fits
        });
        self.is_repeated = true;
        self
    }

    /// Number of requests.
    pub const fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Number of block accesses.
    pub fn accesses(&self) -> usize {
        let lengths = self.requests.iter().map(|one| one.end - one.first);
        lengths.sum()
    }
}
