//! Job table and tier under a model checker, which chooses at every lock, wait and atomic who goes
//! on. Waits never time out there: whoever is not woken up is a deadlock, which the checker reports.
//!
//! Run with `--features shuttle`; `KVSTRATA_TEST_SCHEDULES` is the number of schedules per test.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, and is told how long to go on"
)]

#[path = "schedules/job_table.rs"]
mod job_table;
#[path = "schedules/tier.rs"]
mod tier;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

/// Tasks run on stacks of their own; opening a tier takes more than the usual 32 KiB.
const STACK_BYTES: usize = 1 << 20;

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config
}

fn schedules() -> usize {
    let asked = std::env::var("KVSTRATA_TEST_SCHEDULES");
    asked.map_or(200, |text| text.parse().unwrap())
}

/// Runs `body` under random schedules, and under ones that change their preferences at a few
/// points, which find other mistakes (Burckhardt et al., PCT, 2010).
fn explore(body: impl Fn() + Send + Sync + Clone + 'static) {
    Runner::new(RandomScheduler::new(schedules()), config()).run(body.clone());
    Runner::new(PctScheduler::new(3, schedules()), config()).run(body);
}

/// Whether some schedule makes `body` fail.
fn is_found_out(body: impl Fn() + Send + Sync + Clone + 'static) -> bool {
    let attempt = std::panic::AssertUnwindSafe(move || explore(body));
    std::panic::catch_unwind(attempt).is_err()
}
