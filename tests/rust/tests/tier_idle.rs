//! A tier with nothing to do: engine, writer and keeper sleep. Alone in its process, whose threads
//! it looks at.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and asks the kernel about threads"
)]

mod tier_support;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvstrata_core::io::{Direction, Failure};
use kvstrata_core::job::Outcome;
use kvstrata_core::tier::{CircuitLimits, Seams};
use kvstrata_testkit::faulty::Fault;
use tier_support::faulty::Faulty;
use tier_support::keys;

/// One tier at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Times that the tier's threads were put to sleep and taken from the processor, and their number.
fn switches() -> (u64, usize) {
    let (mut switches, mut threads) = (0, 0);
    for task in Path::new("/proc/self/task").read_dir().unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status"));
        let status = status.unwrap_or_default();
        if !status.starts_with("Name:\tkvstrata-") {
            continue;
        }
        threads += 1;
        switches += status
            .lines()
            .filter_map(|line| line.split_once("ctxt_switches:\t"))
            .map(|(_, count)| count.parse::<u64>().unwrap())
            .sum::<u64>();
    }
    (switches, threads)
}

fn is_idle(io_backend: &str, seconds: u64) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seams = Seams {
        circuit: CircuitLimits {
            failures_max: 2,
            pause_first: Duration::from_millis(10),
            pause_max: Duration::from_millis(20),
        },
        ..Seams::default()
    };
    let mut faulty = Faulty::open_with(|own| io_backend.clone_into(&mut own.io_backend), seams);
    let own = keys(0..32);
    assert_eq!(faulty.harness.store(&own), [Outcome::Ok; 32]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 32]);
    // Both circuits open and close again: nothing of that may go on.
    for direction in [Direction::Read, Direction::Write] {
        faulty.fail(direction, Fault::Fail(Failure::Os(libc::ESTALE)));
        for number in 0..2 {
            match direction {
                Direction::Read => faulty.harness.load(&keys([number])),
                Direction::Write => faulty.harness.store(&keys([100 + number])),
            };
        }
    }
    assert_eq!(faulty.harness.stat("circuit_openings"), 2);
    faulty.choose(|_| Fault::None);
    let is_well = |stats: serde_json::Map<_, _>| stats.get("health").unwrap() == "ok";
    while !is_well(faulty.harness.tier.stats().unwrap()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(300));
    let (before, threads) = switches();
    assert!(threads >= 3, "{threads} threads");
    std::thread::sleep(Duration::from_secs(seconds));
    let (after, still) = switches();
    assert_eq!(still, threads);
    // A thread that wakes up once, at a deadline or to look at the limits of space, is idle; one
    // that looks around is not.
    let turns = after - before;
    assert!(
        turns <= 2 + seconds / 3,
        "{io_backend}: {turns} turns in {seconds} s"
    );
}

#[test]
fn an_idle_tier_sleeps() {
    is_idle("threads", 1);
    is_idle("uring", 1);
}

#[test]
#[ignore = "takes 20 s"]
fn an_idle_tier_sleeps_for_ten_seconds() {
    is_idle("threads", 10);
    is_idle("uring", 10);
}
