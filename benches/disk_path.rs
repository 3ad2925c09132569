//! GB/s of the disk path by row size: whole tiers, their engines alone, and the raw calls,
//! interleaved, in random order, in one directory and one arena. See `Settings` for the
//! environment variables and `README.md` for what the lines mean.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::available_parallelism;

use kvstrata_benches::alone::{self, Kind};
use kvstrata_benches::check::Check;
use kvstrata_benches::ground::{FILE_NAME, Ground, Move, PASSES_HELD, fresh_file, path_of};
use kvstrata_benches::measure::Pass;
use kvstrata_benches::report::{self, Figures, Line, Role};
use kvstrata_benches::settings::Settings;
use kvstrata_benches::whole::Whole;
use kvstrata_benches::{ended, fio, raw, raw_ring, say};
use kvstrata_core::error::{Error, Result};
use kvstrata_core::io::Direction;
use kvstrata_core::sys::fs::{Directory, File, ShareMode};
use kvstrata_testkit::memory::bytes_in_large_pages;
use kvstrata_testkit::payload::next;
use serde_json::{Value, json};

/// Who moves the bytes; with how many threads, or how deep a ring, where that is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A tier over this engine, given jobs of so many bytes at most.
    Tier(&'static str, usize),
    Engine(Kind),
    Raw(Kind),
    /// Without checksums.
    Bare(Kind),
    Fio,
}

/// Bytes of a job, about what a long prompt stores at once.
const JOB: usize = 16 << 20;

const WAYS: [Way; 10] = [
    Way::Tier("uring", JOB),
    Way::Tier("uring", 1),
    Way::Tier("threads", JOB),
    Way::Engine(Kind::Ring(64)),
    Way::Engine(Kind::Threads(32)),
    Way::Raw(Kind::Ring(64)),
    Way::Raw(Kind::Threads(32)),
    Way::Bare(Kind::Ring(64)),
    Way::Bare(Kind::Threads(32)),
    Way::Fio,
];

/// Those that can be the first to write a file.
const FIRST_WAYS: [Way; 4] = [
    Way::Tier("uring", JOB),
    Way::Tier("threads", JOB),
    Way::Raw(Kind::Ring(64)),
    Way::Raw(Kind::Threads(32)),
];

impl Way {
    fn line(self) -> Line {
        let named = |before: &str, kind| match kind {
            Kind::Ring(depth) => format!("{before}uring({depth})"),
            Kind::Threads(count) => format!("{before}threads({count})"),
        };
        let (name, role) = match self {
            Self::Tier(engine, JOB) => (format!("tier {engine}"), Role::Tier),
            Self::Tier(engine, _) => (format!("tier {engine} singly"), Role::Tier),
            Self::Engine(kind) => (named("", kind), Role::Engine),
            Self::Raw(kind) => (named("raw ", kind), Role::Raw),
            Self::Bare(kind) => (named("bare ", kind), Role::Bare),
            Self::Fio => ("fio".to_owned(), Role::Fio),
        };
        Line {
            name,
            role,
            passes: Vec::new(),
        }
    }
}

struct Bench<'a> {
    settings: &'a Settings,
    ground: Ground,
    holder: &'a Path,
    fio: bool,
}

impl Bench<'_> {
    /// All figures of one size of rows.
    fn measure(&mut self, row_bytes: usize, figures: &mut Vec<Value>) -> Result<()> {
        if self.settings.measures("first") {
            figures.push(self.first_writes(row_bytes)?.report());
        }
        let mut tiers = Vec::new();
        for engine in ["uring", "threads"] {
            let root = self.holder.join(engine);
            let tier = Whole::open(root, engine, row_bytes, &self.ground.arena)?;
            tiers.push((engine, tier));
        }
        for (what, direction) in [("overwrite", Direction::Write), ("load", Direction::Read)] {
            if !self.settings.measures(what) {
                continue;
            }
            let mut ways = self.chosen(&WAYS);
            ways.retain(|(way, _)| *way != Way::Fio || (self.fio && direction == Direction::Write));
            self.rounds(&mut ways, |bench, way| match way {
                Way::Tier(engine, job_bytes) => {
                    let tier = tiers.iter_mut().find(|(name, _)| *name == engine);
                    let tier = tier.ok_or_else(|| Error::argument("no such tier"))?;
                    tier.1.settle(bench.ground.random())?;
                    match direction {
                        Direction::Write => tier.1.store(job_bytes),
                        Direction::Read => tier.1.load(bench.ground.random(), job_bytes),
                    }
                }
                way => bench.transfer(way, direction, row_bytes),
            })?;
            figures.push(finish(what, row_bytes, ways).report());
        }
        for (engine, tier) in tiers {
            tier.close()?;
            remove(&self.holder.join(engine))?;
        }
        Ok(())
    }

    /// First writes: into files that nobody has written, made as they are needed.
    fn first_writes(&mut self, row_bytes: usize) -> Result<Figures> {
        let mut ways = self.chosen(&FIRST_WAYS);
        self.rounds(&mut ways, |bench, way| match way {
            Way::Tier(engine, job_bytes) => {
                let root = bench.holder.join("first");
                let arena = Arc::clone(&bench.ground.arena);
                let mut tier = Whole::open(root.clone(), engine, row_bytes, &arena)?;
                let pass = tier.store(job_bytes)?;
                tier.close()?;
                remove(&root)?;
                Ok(pass)
            }
            way => bench.first_transfer(way, row_bytes),
        })?;
        Ok(finish("first", row_bytes, ways))
    }

    /// Those ways that the settings name, with nothing measured yet.
    fn chosen(&self, ways: &[Way]) -> Vec<(Way, Line)> {
        let with_line = |way: &Way| (*way, way.line());
        let mut chosen: Vec<_> = ways.iter().map(with_line).collect();
        chosen.retain(|(_, line)| self.settings.takes(&line.name));
        chosen
    }

    /// Runs every way once a round, each round in another order.
    fn rounds(
        &mut self,
        ways: &mut [(Way, Line)],
        mut pass: impl FnMut(&mut Self, Way) -> Result<Option<Pass>>,
    ) -> Result<()> {
        for _ in 0..self.settings.rounds {
            let seed = self.ground.random();
            ways.sort_by_cached_key(|_| next(seed));
            for (way, line) in &mut *ways {
                let pass = pass(self, *way)?;
                let pass = pass.ok_or_else(|| {
                    Error::argument(format!("{}: not every byte was moved", line.name))
                })?;
                line.passes.push(pass);
            }
        }
        Ok(())
    }

    fn transfer(
        &mut self,
        way: Way,
        direction: Direction,
        row_bytes: usize,
    ) -> Result<Option<Pass>> {
        let moves = self.ground.moves(row_bytes);
        match way {
            Way::Tier(..) => Ok(None),
            Way::Engine(kind) => alone::run(&self.ground, kind, direction, row_bytes, &moves),
            Way::Fio => {
                let path = path_of(&self.ground.directory, FILE_NAME);
                let pass_bytes = self.ground.pass_bytes;
                Ok(fio::store(
                    &path,
                    pass_bytes * PASSES_HELD,
                    pass_bytes,
                    row_bytes,
                ))
            }
            Way::Raw(kind) | Way::Bare(kind) => {
                let check = Check::new(&self.ground.arena, row_bytes)?;
                let check = matches!(way, Way::Raw(_)).then_some(&check);
                let mut good = false;
                let pass = Pass::of(moves.len() * row_bytes, || {
                    good = self.calls(&self.ground.file, kind, direction, row_bytes, &moves, check);
                });
                Ok(good.then_some(pass))
            }
        }
    }

    /// The raw calls.
    fn calls(
        &self,
        file: &File,
        kind: Kind,
        direction: Direction,
        row_bytes: usize,
        moves: &[Move],
        check: Option<&Check>,
    ) -> bool {
        let arena = &self.ground.arena;
        match kind {
            Kind::Ring(depth) => {
                let depth = u32::try_from(depth).unwrap_or(u32::MAX);
                raw_ring::run(file, arena, direction, row_bytes, moves, depth, check)
            }
            Kind::Threads(threads) => {
                raw::run(file, arena, direction, row_bytes, moves, threads, check)
            }
        }
    }

    /// The raw first writes: a file is made and written, all of it in the time.
    fn first_transfer(&mut self, way: Way, row_bytes: usize) -> Result<Option<Pass>> {
        let Way::Raw(kind) = way else {
            return Ok(None);
        };
        let (bytes, name) = (self.ground.pass_bytes, "first.rows");
        let moves = self.ground.moves_among(row_bytes, bytes);
        let check = Check::new(&self.ground.arena, row_bytes)?;
        let ground = &self.ground;
        let mut done = Ok(false);
        let pass = Pass::of(bytes, || {
            let file = fresh_file(&ground.directory, name, &ground.capabilities, bytes);
            done = file.map(|file| {
                let direction = Direction::Write;
                self.calls(&file, kind, direction, row_bytes, &moves, Some(&check))
            });
        });
        let _ = ground.directory.unlink(name);
        Ok(done?.then_some(pass))
    }
}

fn finish(what: &'static str, row_bytes: usize, mut ways: Vec<(Way, Line)>) -> Figures {
    ways.sort_by_key(|(way, _)| WAYS.iter().position(|other| other == way));
    Figures {
        what,
        row_bytes,
        lines: ways.into_iter().map(|(_, line)| line).collect(),
    }
}

/// Removes the files of a closed tier.
#[expect(
    clippy::disallowed_methods,
    reason = "nothing of it is of use any more"
)]
fn remove(root: &Path) -> Result<()> {
    std::fs::remove_dir_all(root)
        .map_err(|error| Error::config("a tier's root cannot be removed").with_source(error))
}

fn main() -> ExitCode {
    ended(&run())
}

fn run() -> Result<()> {
    let settings = Settings::from_environment()?;
    settings.check_ways(&WAYS.map(|way| way.line().name))?;
    let holder = tempfile::tempdir_in(&settings.directory)
        .map_err(|error| Error::config("KVSTRATA_BENCH_DIR cannot be used").with_source(error))?;
    let directory = Directory::open_root(holder.path(), false, ShareMode::Private)?;
    let ground = Ground::new(
        Arc::new(directory),
        settings.pass_bytes,
        settings.large_pages,
    )?;
    let processors = available_parallelism().map_or(0, usize::from);
    let mebibytes = settings.pass_bytes >> 20;
    let (capabilities, rounds) = (ground.capabilities.of_root(), settings.rounds);
    let large = bytes_in_large_pages();
    say(&format!(
        "{processors} processors; {capabilities}; {mebibytes} MiB a pass over {} MiB, {} MiB of memory in \
         large pages, median of {rounds}",
        mebibytes * PASSES_HELD,
        large >> 20,
    ));
    let fio = fio::is_installed();
    if !fio {
        say("fio not installed");
    }
    let mut bench = Bench {
        settings: &settings,
        ground,
        holder: holder.path(),
        fio,
    };
    let mut figures = Vec::new();
    for row_bytes in &settings.row_bytes {
        bench.measure(*row_bytes, &mut figures)?;
    }
    let machine = json!({
        "processors": processors,
        "root": capabilities,
        "pass_bytes": settings.pass_bytes,
        "bytes_in_large_pages": large,
        "rounds": rounds,
    });
    if let Some(path) = &settings.json {
        report::write(path, &machine, &figures).map_err(|error| {
            Error::config("KVSTRATA_BENCH_JSON cannot be written").with_source(error)
        })?;
    }
    Ok(())
}
