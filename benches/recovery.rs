//! How long a tier takes to open on many stored rows, and how much memory they take: row tables
//! in the page cache, rows as holes. `KVSTRATA_BENCH_RECOVERY_ROWS` names other numbers of rows.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use kvstrata_benches::measure::Pass;
use kvstrata_benches::settings::Settings;
use kvstrata_benches::{ended, say};
use kvstrata_core::error::{Error, Result};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::tier::Tier;
use kvstrata_testkit::allocation::Counting;
use kvstrata_testkit::memory::leaked;
use kvstrata_testkit::stored_rows::{key, make, options};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const CLOSE_TIME_MAX: Duration = Duration::from_secs(10);

struct Opened {
    wall: Duration,
    processor: Duration,
    lookup: Duration,
    live_bytes: usize,
    peak_bytes: usize,
}

fn open(root: &Path, rows: u64) -> Result<Opened> {
    let arena = leaked(4096, 0)?;
    let before = ALLOCATOR.live_bytes();
    let _ = ALLOCATOR.take_peak_bytes();
    let mut opened = None;
    let pass = Pass::of(0, || opened = Some(Tier::open(options(root), arena)));
    let tier = opened.ok_or_else(|| Error::argument("a pass has a body"))??;
    let keys = [key(0)?, key(rows - 1)?, key(rows)?];
    let begun = SystemClock.now();
    let found = tier.lookup(&keys)?;
    let lookup = SystemClock.now().saturating_duration_since(begun);
    if found != [Some(rows > 0), Some(rows > 0), Some(false)] {
        return Err(Error::argument(format!("looked up: {found:?}")));
    }
    let opened = Opened {
        wall: pass.wall,
        processor: pass.processor,
        lookup,
        live_bytes: ALLOCATOR.live_bytes().saturating_sub(before),
        peak_bytes: ALLOCATOR.take_peak_bytes().saturating_sub(before),
    };
    tier.close(CLOSE_TIME_MAX)?;
    Ok(opened)
}

#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "a figure with three digits"
)]
fn per_row(bytes: usize, rows: u64) -> f64 {
    bytes as f64 / rows as f64
}

fn main() -> ExitCode {
    ended(&run())
}

fn run() -> Result<()> {
    let settings = Settings::from_environment()?;
    for rows in settings.recovery_rows.iter().copied() {
        let broken = |error| Error::config("the rows cannot be made").with_source(error);
        let holder = tempfile::tempdir_in(&settings.directory).map_err(broken)?;
        make(holder.path(), rows).map_err(broken)?;
        let mut all = Vec::new();
        for _ in 0..settings.rounds {
            all.push(open(holder.path(), rows)?);
        }
        all.sort_by_key(|opened| opened.wall);
        let (Some(least), Some(most)) = (all.first(), all.last()) else {
            continue;
        };
        let Some(middle) = all.get(all.len() / 2) else {
            continue;
        };
        say(&format!(
            "{rows:>9} rows  open {:.4} s ({:.4} to {:.4}), {:.2} CPU s  first lookup {:.4} s after  \
             {:.1} bytes a row ({:.1} at most while opening)",
            middle.wall.as_secs_f64(),
            least.wall.as_secs_f64(),
            most.wall.as_secs_f64(),
            middle.processor.as_secs_f64(),
            middle.lookup.as_secs_f64(),
            per_row(middle.live_bytes, rows),
            per_row(middle.peak_bytes, rows),
        ));
    }
    Ok(())
}
