//! What a tier counts and times.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::io::threads::{Bounce, Executed, Executor, FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::{Alignment, Direction, EngineCounters, Failure, Operation};
use kvstrata_core::job::Outcome;
use kvstrata_core::sys::clock::Clock;
use kvstrata_core::tier::{CircuitLimits, Seams};
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::faulty::Fault;
use serde_json::Value;
use tier_support::faulty::{CAPACITY, Faulty};
use tier_support::{Harness, ROW_BYTES, key, keys, options, row_files};

/// A disk that takes 50 ms for each operation, by the manual clock.
#[derive(Debug)]
struct SlowDisk {
    inner: FileExecutor,
    clock: Arc<ManualClock>,
}

const SLOW: Duration = Duration::from_millis(50);

impl Executor for SlowDisk {
    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed {
        self.clock.advance(SLOW);
        self.inner.execute(operation, bounce)
    }

    fn requirements(&self) -> Alignment {
        self.inner.requirements()
    }

    fn counters(&self) -> EngineCounters {
        self.inner.counters()
    }
}

fn on_slow_disk(root: &std::path::Path) -> Harness {
    let own = Arc::new(ManualClock::default());
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(&own);
    let one_thread = ThreadCounts {
        working: 1,
        replacements_max: 1,
    };
    let seams = Seams {
        clock,
        start_engine: Arc::new(move |capabilities, files, clock, sink| {
            let (direct, alignment) = (capabilities.direct, capabilities.alignment);
            let inner = FileExecutor::new(files, Arc::clone(&clock), direct, alignment);
            let executor = Arc::new(SlowDisk {
                inner,
                clock: Arc::clone(&own),
            });
            let threads = Threads::with_executor(executor, clock, one_thread, sink)?;
            Ok(Arc::new(threads))
        }),
        ..Seams::default()
    };
    Harness::open_with(options(root, ROW_BYTES, CAPACITY), 64, seams)
}

/// A figure of a hop: a count, or a duration in microseconds.
fn figure(stats: &Value, hop: &str, name: &str) -> u128 {
    let told = stats.pointer(&format!("/latency/{hop}/{name}")).unwrap();
    told.as_u64().map_or_else(
        || Duration::from_secs_f64(told.as_f64().unwrap()).as_micros(),
        u128::from,
    )
}

#[test]
fn each_hop_shows_the_time_that_the_disk_takes() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut harness = on_slow_disk(root.path());
    let own = keys(0..4);
    assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
    // Two rows that do not lie side by side: two operations, one after the other.
    assert_eq!(harness.load(&[own[0], own[2]]), [Outcome::Ok; 2]);
    let stats = Value::from(harness.tier.stats().unwrap());
    assert_eq!(figure(&stats, "write", "count"), 1);
    assert_eq!(figure(&stats, "write", "sum_seconds"), 50_000);
    assert_eq!(figure(&stats, "write_wait", "sum_seconds"), 0);
    assert_eq!(figure(&stats, "store", "max_seconds"), 50_000);
    assert_eq!(figure(&stats, "store_plan_wait", "count"), 1);
    assert_eq!(figure(&stats, "read", "count"), 2);
    assert_eq!(figure(&stats, "read", "p50_seconds"), 50_000);
    assert_eq!(figure(&stats, "read", "sum_seconds"), 100_000);
    // The second read waited for the first.
    assert_eq!(figure(&stats, "read_wait", "max_seconds"), 50_000);
    assert_eq!(figure(&stats, "read_wait", "sum_seconds"), 50_000);
    assert_eq!(figure(&stats, "load", "count"), 1);
    assert_eq!(figure(&stats, "load", "p99_seconds"), 100_000);
}

/// Overwrites the first bytes of the rows of a root's only row file.
fn spoil(root: &std::path::Path) {
    let path = row_files(root).pop().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let start = kvstrata_testkit::payload::payload(key(1, 0).as_bytes(), 64);
    let at = bytes.windows(64).position(|window| window == start);
    *bytes.get_mut(at.unwrap()).unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

fn check_outcomes(stats: &Value, kind: &str, expected: [(&str, u64); 8]) {
    let told = |name: String| stats.pointer(&name).unwrap().as_u64().unwrap();
    for (outcome, count) in expected {
        assert_eq!(
            told(format!("/{kind}_outcomes/{outcome}")),
            count,
            "{kind} {outcome}"
        );
    }
    let sum: u64 = expected.iter().map(|(_, count)| count).sum();
    assert_eq!(told(format!("/{kind}_keys")), sum);
}

#[test]
fn each_outcome_is_counted_once_where_it_happened_once() {
    let mut faulty = Faulty::open(|_| {});
    let fail = |errno| Fault::Fail(Failure::Os(errno));
    // Stores, one key each.
    assert_eq!(faulty.harness.store(&keys([1])), [Outcome::Ok]);
    assert_eq!(faulty.harness.store(&keys([1])), [Outcome::Present]);
    faulty.fail(Direction::Write, fail(libc::ENOSPC));
    assert_eq!(faulty.harness.store(&keys([2])), [Outcome::NoSpace]);
    faulty.fail(Direction::Write, fail(libc::EIO));
    assert_eq!(faulty.harness.store(&keys([3])), [Outcome::IoError]);
    faulty.fail(Direction::Write, Fault::Fail(Failure::TimedOut));
    assert_eq!(faulty.harness.store(&keys([4])), [Outcome::Timeout]);
    faulty.fail(Direction::Write, Fault::Hold);
    let held = faulty.harness.begin_store(&keys([5]));
    while faulty.engine.held() == 0 {
        std::thread::yield_now();
    }
    let stats = Value::from(faulty.harness.tier.stats().unwrap());
    assert_eq!(stats["running_jobs"], 1);
    assert_eq!(stats["store_bytes_open"], ROW_BYTES);
    faulty.harness.tier.remove(&keys([5])).unwrap();
    faulty.engine.release();
    assert_eq!(faulty.harness.result(held).outcomes, [Outcome::Dropped]);
    // Loads.
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.load(&keys([1])), [Outcome::Ok]);
    assert_eq!(faulty.harness.load(&keys([9])), [Outcome::Miss]);
    spoil(faulty.root.path());
    assert_eq!(faulty.harness.load(&keys([1])), [Outcome::Corrupt]);
    for (number, failure, outcome) in [
        (10, Failure::Os(libc::EIO), Outcome::IoError),
        (11, Failure::TimedOut, Outcome::Timeout),
    ] {
        faulty.choose(|_| Fault::None);
        faulty.harness.tier.remove(&keys([1])).unwrap();
        let before = faulty.harness.store(&keys([number]));
        assert_eq!(before, [Outcome::Ok]);
        faulty.fail(Direction::Read, Fault::Fail(failure));
        assert_eq!(faulty.harness.load(&keys([number])), [outcome]);
    }
    let stats = Value::from(faulty.harness.tier.stats().unwrap());
    let stores = [
        ("ok", 3),
        ("present", 1),
        ("miss", 0),
        ("corrupt", 0),
        ("no_space", 1),
        ("io_error", 1),
        ("timeout", 1),
        ("dropped", 1),
    ];
    let loads = [
        ("ok", 1),
        ("present", 0),
        ("miss", 1),
        ("corrupt", 1),
        ("no_space", 0),
        ("io_error", 1),
        ("timeout", 1),
        ("dropped", 0),
    ];
    check_outcomes(&stats, "store", stores);
    check_outcomes(&stats, "load", loads);
    assert_eq!(stats["corrupt_rows"], 1);
    assert_eq!(stats["retired_rows"], 2);
    assert_eq!(stats["running_jobs"], 0);
    assert_eq!(stats["store_bytes_open"], 0);
    // The first removed row and those of the loads that failed are gone; nothing is left.
    assert_eq!(stats["rows"], 0);
}

#[test]
fn what_is_refused_or_too_much_is_counted_as_offered_too() {
    let seams = Seams {
        circuit: CircuitLimits {
            failures_max: 1,
            ..CircuitLimits::default()
        },
        ..Seams::default()
    };
    let mut faulty = Faulty::open_with(|_| {}, seams);
    let own = keys(0..8);
    faulty.fail(Direction::Write, Fault::Hold);
    let first = faulty.harness.begin_store(&keys(0..64));
    assert_eq!(faulty.harness.store(&keys([100])), [Outcome::Dropped]);
    // Of its operations some may come back, and be held, later than others.
    let drained = |faulty: &Faulty| faulty.harness.tier.drain_for(Duration::from_millis(5));
    while !drained(&faulty).unwrap() {
        faulty.engine.release();
    }
    faulty.fail(Direction::Write, Fault::Fail(Failure::Os(libc::EIO)));
    assert!(faulty.harness.result(first).success());
    faulty.fail(Direction::Read, Fault::Fail(Failure::Os(libc::EIO)));
    assert_eq!(faulty.harness.load(&own[..1]), [Outcome::IoError]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Miss; 8]);
    let stats = Value::from(faulty.harness.tier.stats().unwrap());
    assert_eq!(stats["store_keys"], 65);
    assert_eq!(stats["load_keys"], 9);
    for (outcomes, offered) in [("store_outcomes", 65), ("load_outcomes", 9)] {
        let counts = stats[outcomes].as_object().unwrap();
        let sum: u64 = counts.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(sum, offered);
    }
    assert_eq!(stats["circuit_missed_loads"], 8);
}
