//! The file, the arena and the order of rows that engines and raw calls share.

use std::path::Path;
use std::sync::Arc;

use kvstrata_core::buffer::Arena;
use kvstrata_core::error::{Error, Result};
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::{Capabilities, Direction};
use kvstrata_core::sys::fs::{Access, Direct, Directory, File};
use kvstrata_testkit::memory::{leaked_arena, leaked_in_large_pages};
use kvstrata_testkit::payload::{next, payload};

use crate::{count, raw};

/// Name of the file.
pub const FILE_NAME: &str = "bench.rows";
/// Bytes of the file in passes: as many as a tier's row files have, so that a pass overwrites a
/// random half.
pub const PASSES_HELD: usize = 2;

/// Threads and bytes a call with which the file is written for the first time.
const LAY_OUT: (usize, usize) = (4, 1 << 20);

/// One row's transfer: slot in the arena and place in the file, in bytes.
pub type Move = (usize, u64);

/// Where the passes run.
#[derive(Debug)]
pub struct Ground {
    /// The directory measured.
    pub directory: Arc<Directory>,
    /// What the probe says of it.
    pub capabilities: Capabilities,
    /// The memory of all passes, as long as a pass.
    pub arena: Arc<Arena>,
    /// The file, open for direct transfers where they work.
    pub file: File,
    /// Bytes of a pass.
    pub pass_bytes: usize,
    seed: u64,
}

impl Ground {
    /// Makes arena and file, and writes the file once: a first write into an unwritten extent
    /// costs more, and is measured apart.
    ///
    /// # Errors
    /// When there is no memory or no space.
    pub fn new(directory: Arc<Directory>, pass_bytes: usize, large_pages: bool) -> Result<Self> {
        let capabilities = probe(&directory, "threads")?;
        let arena = if large_pages {
            leaked_in_large_pages(pass_bytes)?
        } else {
            leaked_arena(pass_bytes, 0)?
        };
        let pattern = payload(b"disk path", 1 << 20);
        for offset in (0..pass_bytes).step_by(pattern.len()) {
            if !arena.copy_in(offset, &pattern) {
                return Err(Error::argument("a pass is whole MiB"));
            }
        }
        let file = fresh_file(
            &directory,
            FILE_NAME,
            &capabilities,
            pass_bytes * PASSES_HELD,
        )?;
        let mut ground = Self {
            directory,
            capabilities,
            arena,
            file,
            pass_bytes,
            seed: 5,
        };
        let (threads, bytes) = LAY_OUT;
        for half in 0..PASSES_HELD {
            let moves: Vec<Move> = (0..pass_bytes / bytes)
                .map(|row| (row * bytes, count(half * pass_bytes + row * bytes)))
                .collect();
            let done = raw::run(
                &ground.file,
                &ground.arena,
                Direction::Write,
                bytes,
                &moves,
                threads,
                None,
            );
            if !done {
                return Err(Error::argument("the file cannot be written"));
            }
        }
        ground.file.sync_all().map_err(broken)?;
        ground.seed = 6;
        Ok(ground)
    }

    /// A random choice.
    pub const fn random(&mut self) -> &mut u64 {
        &mut self.seed
    }

    /// As many rows as fill a pass, at random places of the file, each with a slot of its own.
    pub fn moves(&mut self, row_bytes: usize) -> Vec<Move> {
        self.moves_among(row_bytes, self.pass_bytes * PASSES_HELD)
    }

    /// [`Ground::moves`] within the first `file_bytes` of the file.
    pub fn moves_among(&mut self, row_bytes: usize, file_bytes: usize) -> Vec<Move> {
        let mut rows: Vec<usize> = (0..file_bytes / row_bytes).collect();
        rows.sort_by_cached_key(|_| next(&mut self.seed));
        rows.truncate(self.pass_bytes / row_bytes);
        let place = |(slot, row): (usize, usize)| (slot * row_bytes, count(row * row_bytes));
        rows.into_iter().enumerate().map(place).collect()
    }
}

/// A new file whose space is reserved and not written.
///
/// # Errors
/// When there is no space.
pub fn fresh_file(
    directory: &Directory,
    name: &str,
    capabilities: &Capabilities,
    bytes: usize,
) -> Result<File> {
    let made = directory.create_new(name, Access::Write, Direct::No);
    let made = made.map_err(broken)?;
    made.allocate(count(bytes)).map_err(broken)?;
    made.sync_all().map_err(broken)?;
    directory
        .open(name, Access::Write, capabilities.direct)
        .map_err(broken)
}

/// Where a directory is, for programs that are given paths.
pub fn path_of(directory: &Directory, name: &str) -> std::path::PathBuf {
    let path: &Path = directory.path();
    path.join(name)
}

fn broken(error: std::io::Error) -> Error {
    Error::config("the file cannot be made").with_source(error)
}
