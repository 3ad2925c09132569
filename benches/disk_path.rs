//! GB/s of the disk path by row size: a whole tier, its engine alone, and the raw calls,
//! interleaved, in random order, on one directory. Engine and raw share file and arena; the tier
//! has files of its own, adds checksums and row tables, and stores new rows in every pass. See
//! `Settings` for the environment variables.

use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use kvstrata_benches::measure::{Pass, median};
use kvstrata_benches::raw;
use kvstrata_benches::say;
use kvstrata_benches::settings::Settings;
use kvstrata_benches::whole::Whole;
use kvstrata_core::buffer::Arena;
use kvstrata_core::error::{Error, Result};
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::threads::{FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::uring;
use kvstrata_core::io::{
    Capabilities, Channel, DataFile, Direction, Engine, Memory, Operation, OperationId, Segment,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Access, Direct, Directory, File, ShareMode};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::{next, payload};

const ROW_BYTES: [usize; 3] = [64 << 10, 256 << 10, 2 << 20];
const PASS_TIME_MAX: Duration = Duration::from_mins(10);

/// Who moves the bytes; with how many threads, or how deep a ring, where that is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tier,
    Engine(usize),
    Ring(usize),
    Raw(usize),
}

const WAYS: [Way; 7] = [
    Way::Tier,
    Way::Engine(4),
    Way::Engine(8),
    Way::Ring(8),
    Way::Ring(64),
    Way::Raw(8),
    Way::Raw(16),
];

struct Ground {
    directory: Arc<Directory>,
    capabilities: Capabilities,
    arena: Arc<Arena>,
    file: File,
    whole: Option<Whole>,
    pass_bytes: usize,
    seed: u64,
}

impl Ground {
    fn new(directory: Arc<Directory>, pass_bytes: usize) -> Result<Self> {
        let capabilities = probe(&directory, "threads")?;
        let arena = leaked_arena(pass_bytes, 0)?;
        let pattern = payload(b"disk path", 1 << 20);
        for offset in (0..pass_bytes).step_by(pattern.len()) {
            let length = pattern.len().min(pass_bytes - offset);
            if !arena.copy_in(offset, pattern.get(..length).unwrap_or_default()) {
                return Err(Error::argument("the arena is too short"));
            }
        }
        let broken = |error| Error::config("the file cannot be made").with_source(error);
        let length = u64::try_from(pass_bytes).unwrap_or(u64::MAX);
        let whole = directory.create_new("bench.rows", Access::Write, Direct::No);
        let whole = whole.map_err(broken)?;
        whole.allocate(length).map_err(broken)?;
        // A first write into an unwritten extent costs more: not what is measured.
        let moves: Vec<raw::Move> = moves(pass_bytes, 1 << 20, &mut 1);
        let direct = capabilities.direct;
        let file = directory
            .open("bench.rows", Access::Write, direct)
            .map_err(broken)?;
        raw::run(&file, &arena, Direction::Write, 1 << 20, &moves, 4);
        file.sync_all().map_err(broken)?;
        Ok(Self {
            directory,
            capabilities,
            arena,
            file,
            whole: None,
            pass_bytes,
            seed: 5,
        })
    }

    /// One pass over the whole file in random order; None when a byte was not moved.
    fn pass(&mut self, way: Way, direction: Direction, row_bytes: usize) -> Result<Option<Pass>> {
        if way == Way::Tier {
            let whole = self.whole.as_mut();
            let whole = whole.ok_or_else(|| Error::argument("no tier is open"))?;
            return whole.pass(direction, row_bytes, &mut self.seed);
        }
        Ok(self.transfers(way, direction, row_bytes))
    }

    fn transfers(&mut self, way: Way, direction: Direction, row_bytes: usize) -> Option<Pass> {
        let moves = moves(self.pass_bytes, row_bytes, &mut self.seed);
        let bytes = moves.len() * row_bytes;
        let mut good = false;
        let pass = match way {
            Way::Tier => return None,
            Way::Raw(threads) => Pass::of(bytes, || {
                good = raw::run(
                    &self.file,
                    &self.arena,
                    direction,
                    row_bytes,
                    &moves,
                    threads,
                );
            }),
            Way::Engine(_) | Way::Ring(_) => {
                let completions = Completions::default();
                let engine = self.engine(way, &completions)?;
                let operations = self.operations(direction, row_bytes, &moves);
                let pass = Pass::of(bytes, || {
                    engine.submit(operations);
                    let done = completions.wait(moves.len(), PASS_TIME_MAX);
                    good = done.len() == moves.len() && done.iter().all(|one| one.result.is_ok());
                });
                engine.shutdown(PASS_TIME_MAX).then_some(pass)?
            }
        };
        good.then_some(pass)
    }

    fn engine(&self, way: Way, completions: &Completions) -> Option<Arc<dyn Engine>> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let (files, sink) = (Arc::new(FileCache::new(24)), completions.sink());
        let (direct, alignment) = (self.capabilities.direct, self.capabilities.alignment);
        match way {
            Way::Engine(threads) => {
                let executor = FileExecutor::new(files, Arc::clone(&clock), direct, alignment);
                let counts = ThreadCounts {
                    working: threads,
                    replacements_max: 0,
                };
                let engine = Threads::with_executor(Arc::new(executor), clock, counts, sink);
                Some(Arc::new(engine.ok()?))
            }
            Way::Ring(depth) => {
                let settings = uring::Settings { depth, alter: None };
                let mode = (direct, alignment);
                let engine = uring::Uring::with_settings(&settings, mode, files, clock, sink);
                Some(Arc::new(engine.ok()?))
            }
            Way::Tier | Way::Raw(_) => None,
        }
    }

    fn operations(
        &self,
        direction: Direction,
        row_bytes: usize,
        moves: &[raw::Move],
    ) -> Vec<Operation> {
        let file = DataFile::new(Arc::clone(&self.directory), "bench.rows", Access::Write);
        let deadline = SystemClock.now() + PASS_TIME_MAX;
        let operation = |(id, (slot, offset)): (u64, &raw::Move)| Operation {
            id: OperationId(id),
            direction,
            file: Arc::clone(&file),
            channel: Channel::Rows,
            offset: *offset,
            segments: vec![Segment {
                memory: Memory::Arena(Arc::clone(&self.arena)),
                offset: *slot,
                length: row_bytes,
            }],
            deadline,
        };
        (0..).zip(moves).map(operation).collect()
    }
}

/// Every row of the file once, in random order, each with a slot of its own.
fn moves(pass_bytes: usize, row_bytes: usize, seed: &mut u64) -> Vec<raw::Move> {
    let mut rows: Vec<usize> = (0..pass_bytes / row_bytes).collect();
    rows.sort_by_cached_key(|_| next(seed));
    let place = |(slot, row): (usize, usize)| {
        (
            slot * row_bytes,
            u64::try_from(row * row_bytes).unwrap_or(u64::MAX),
        )
    };
    rows.into_iter().enumerate().map(place).collect()
}

fn report(ground: &mut Ground, rounds: usize) -> Result<()> {
    for direction in [Direction::Write, Direction::Read] {
        for row_bytes in ROW_BYTES {
            let mut passes = WAYS.map(|way| (way, Vec::new()));
            for _ in 0..rounds {
                let seed = &mut ground.seed;
                passes.sort_by_cached_key(|_| next(seed));
                for (way, done) in &mut passes {
                    let pass = ground.pass(*way, direction, row_bytes)?.ok_or_else(|| {
                        Error::argument(format!("{way:?}: not every byte was moved"))
                    })?;
                    done.push(pass);
                }
            }
            passes.sort_by_key(|(way, _)| WAYS.iter().position(|other| other == way));
            for (way, done) in passes {
                let Some((middle, low, high)) = median(done) else {
                    continue;
                };
                say(&format!(
                    "{:<6} {:>5} KiB  {:<11} {:>6.2} GB/s ({low:.2} to {high:.2})  {:.3} CPU s/GB",
                    format!("{direction:?}").to_lowercase(),
                    row_bytes >> 10,
                    format!("{way:?}").to_lowercase(),
                    middle.gigabytes_per_second(),
                    middle.processor_per_gigabyte(),
                ));
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let settings = Settings::from_environment();
    let holder = tempfile::tempdir_in(&settings.directory)
        .map_err(|error| Error::config("KVSTRATA_BENCH_DIR cannot be used").with_source(error))?;
    let directory = Directory::open_root(holder.path(), false, ShareMode::Private)?;
    let mut ground = Ground::new(Arc::new(directory), settings.pass_bytes)?;
    say(&format!(
        "{} processors; {}; {} MiB a pass, median of {}",
        available_parallelism().map_or(0, usize::from),
        ground.capabilities,
        settings.pass_bytes >> 20,
        settings.rounds,
    ));
    let root = holder.path().join("tier");
    ground.whole = Some(Whole::open(root, &ROW_BYTES, settings.pass_bytes)?);
    report(&mut ground, settings.rounds)?;
    ground.whole.map_or(Ok(()), Whole::close)
}
