//! A tier gives up a device that keeps failing, and takes it up again by itself.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvstrata_core::io::{Direction, Failure, Operation};
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::tier::{CircuitLimits, Seams};
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::faulty::Fault;
use serde_json::Value;
use tier_support::faulty::Faulty;
use tier_support::{keys, row_files};

const SECOND: Duration = Duration::from_secs(1);
const FAILURES: u32 = 3;

/// A tier on a clock that the test moves, which counts the operations that its engine is given.
struct Bench {
    faulty: Faulty,
    clock: Arc<ManualClock>,
    operations: Arc<AtomicUsize>,
}

impl Bench {
    fn open() -> Self {
        let clock = Arc::new(ManualClock::default());
        let seams = Seams {
            clock: Arc::<ManualClock>::clone(&clock),
            circuit: CircuitLimits {
                failures_max: FAILURES,
                pause_first: SECOND,
                pause_max: 60 * SECOND,
            },
            ..Seams::default()
        };
        let faulty = Faulty::open_with(|_| {}, seams);
        Self {
            faulty,
            clock,
            operations: Arc::default(),
        }
    }

    /// From now on operations of one direction do what `fault` says, and are counted.
    fn fail(&self, direction: Direction, fault: impl Fn() -> Fault + Send + 'static) {
        let operations = Arc::clone(&self.operations);
        operations.store(0, Ordering::SeqCst);
        self.faulty.choose(move |operation: &Operation| {
            if operation.direction == direction {
                operations.fetch_add(1, Ordering::SeqCst);
                fault()
            } else {
                Fault::None
            }
        });
    }

    fn operations(&self) -> usize {
        self.operations.load(Ordering::SeqCst)
    }

    fn stat(&self, name: &str) -> Value {
        let stats = self.faulty.harness.tier.stats().unwrap();
        stats.get(name).unwrap().clone()
    }

    /// Log lines that contain `text`.
    fn lines(&self, text: &str) -> Vec<String> {
        let lines = self.faulty.harness.tier.take_notices();
        let lines = lines.into_iter().map(|notice| notice.text);
        lines.filter(|line| line.contains(text)).collect()
    }

    /// Calls the tier until `condition` holds: who is refused wakes the keeper.
    fn until(&mut self, direction: Direction, condition: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !condition(self) {
            assert!(Instant::now() < end, "it never came to that");
            self.nudge(direction);
        }
    }

    fn nudge(&mut self, direction: Direction) {
        match direction {
            Direction::Read => drop(self.faulty.harness.found(&keys(0..1))),
            Direction::Write => {
                let job = self.faulty.harness.job();
                let key = keys([u64::MAX - job]);
                self.faulty.harness.tier.store(job, &key, &[0]).unwrap();
                self.faulty.harness.result(job);
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }

    /// Calls the tier for a while: nothing may come of it.
    fn linger(&mut self, direction: Direction) {
        for _ in 0..30 {
            self.nudge(direction);
        }
    }

    fn load(&mut self, keys: &[Key]) -> Vec<Outcome> {
        self.faulty.harness.load(keys)
    }

    fn store(&mut self, keys: &[Key]) -> Vec<Outcome> {
        self.faulty.harness.store(keys)
    }
}

fn eio() -> Fault {
    Fault::Fail(Failure::Os(libc::EIO))
}

#[test]
fn reads_are_given_up_after_exactly_so_many_failures_and_taken_up_after_one_trial() {
    let mut bench = Bench::open();
    let own = keys(0..16);
    assert_eq!(bench.store(&own), [Outcome::Ok; 16]);
    bench.fail(Direction::Read, eio);
    for at in 0..3 {
        assert_eq!(bench.stat("circuit_reads"), "closed", "{at} failures");
        assert_eq!(bench.load(&own[at..=at]), [Outcome::IoError]);
    }
    assert_eq!(bench.operations(), 3);
    assert_eq!(bench.stat("circuit_reads"), "open");
    assert_eq!(bench.stat("circuit_writes"), "closed");
    assert_eq!(bench.stat("circuit_openings"), 1);
    assert_eq!(bench.stat("health"), "degraded");
    let last = bench.stat("last_error");
    assert_eq!(
        (&last["errno"], &last["operation"]),
        (&Value::from("EIO"), &Value::from("read"))
    );
    let path = last["path"].as_str().unwrap();
    assert_eq!(path.rsplit_once('.').unwrap().1, "rows", "{path}");
    assert_eq!(last["seconds_ago"], 0.0);

    // While it is open: misses at once, no operation, and stores go on.
    assert_eq!(bench.faulty.harness.found(&own), [false; 16]);
    assert_eq!(bench.load(&own), [Outcome::Miss; 16]);
    assert_eq!(bench.stat("circuit_missed_loads"), 16);
    assert_eq!(bench.stat("circuit_missed_lookups"), 16);
    assert_eq!(bench.store(&keys(100..104)), [Outcome::Ok; 4]);
    bench.linger(Direction::Read);
    assert_eq!(bench.operations(), 3);
    assert_eq!(bench.lines("reads keep failing").len(), 1);

    // One trial, however long it takes and however often the tier is called meanwhile.
    bench.fail(Direction::Read, || Fault::Hold);
    bench.clock.advance(SECOND);
    bench.until(Direction::Read, |bench| bench.operations() > 0);
    assert_eq!(bench.stat("circuit_reads"), "half-open");
    bench.linger(Direction::Read);
    bench.clock.advance(1000 * SECOND);
    bench.linger(Direction::Read);
    assert_eq!(bench.operations(), 1);
    assert_eq!(bench.stat("circuit_reads"), "half-open");
    assert_eq!(bench.load(&own), [Outcome::Miss; 16]);
    assert_eq!(bench.operations(), 1);

    bench.faulty.choose(|_| Fault::None);
    while bench.faulty.engine.held() == 0 {
        std::thread::yield_now();
    }
    bench.faulty.engine.release();
    bench.until(Direction::Read, |bench| {
        bench.stat("circuit_reads") == "closed"
    });
    assert_eq!(bench.stat("health"), "ok");
    assert_eq!(bench.lines("reads work again").len(), 1);
    assert_eq!(bench.lines("reads keep failing").len(), 0);
    // The failures before the last cost their rows, as any failed load does; nothing else did.
    let mut found = vec![true; 16];
    (found[0], found[1]) = (false, false);
    assert_eq!(bench.faulty.harness.found(&own), found);
    assert_eq!(bench.load(&own[2..]), [Outcome::Ok; 14]);
    assert_eq!(bench.stat("retired_rows"), 2);
}

#[test]
fn a_success_between_failures_keeps_reads_going() {
    let mut bench = Bench::open();
    let own = keys(0..16);
    bench.store(&own);
    for at in 0..6 {
        bench.fail(Direction::Read, eio);
        assert_eq!(bench.load(&own[at..=at]), [Outcome::IoError]);
        if at % 2 == 1 {
            bench.faulty.choose(|_| Fault::None);
            assert_eq!(bench.load(&own[10..11]), [Outcome::Ok]);
        }
    }
    assert_eq!(bench.stat("circuit_openings"), 0);
    assert_eq!(bench.stat("circuit_reads"), "closed");
}

#[test]
fn a_trial_that_fails_is_followed_by_a_pause_twice_as_long() {
    let mut bench = Bench::open();
    let own = keys(0..16);
    bench.store(&own);
    bench.fail(Direction::Read, eio);
    for at in 0..3 {
        bench.load(&own[at..=at]);
    }
    bench.fail(Direction::Read, eio);
    for (trials, pause) in [1, 2, 4, 8].into_iter().enumerate() {
        bench.clock.advance((pause - 1) * SECOND + SECOND / 10 * 9);
        bench.linger(Direction::Read);
        assert_eq!(bench.operations(), trials);
        bench.clock.advance(SECOND / 10);
        bench.until(Direction::Read, |bench| {
            bench.operations() == trials + 1 && bench.stat("circuit_reads") == "open"
        });
    }
    assert_eq!(bench.stat("circuit_openings"), 1);
    assert_eq!(bench.lines("reads keep failing").len(), 1);
    bench.fail(Direction::Read, || Fault::None);
    bench.clock.advance(16 * SECOND);
    bench.until(Direction::Read, |bench| {
        bench.stat("circuit_reads") == "closed"
    });
    assert_eq!(bench.operations(), 1);
    assert_eq!(bench.load(&own[2..]), [Outcome::Ok; 14]);
}

#[test]
fn writes_that_are_refused_are_given_up_while_reads_go_on() {
    let mut bench = Bench::open();
    let own = keys(0..8);
    bench.store(&own);
    bench.fail(Direction::Write, || Fault::Fail(Failure::Os(libc::EROFS)));
    for at in 0..3 {
        assert_eq!(bench.stat("circuit_writes"), "closed", "{at} failures");
        assert_eq!(bench.store(&keys([100 + at])), [Outcome::IoError]);
    }
    assert_eq!(bench.operations(), 3);
    assert_eq!(bench.stat("circuit_writes"), "open");
    assert_eq!(bench.stat("circuit_reads"), "closed");
    assert_eq!(bench.stat("health"), "degraded");
    assert_eq!(bench.stat("last_error")["errno"], "EROFS");
    assert_eq!(bench.stat("last_error")["operation"], "write");
    assert_eq!(bench.store(&keys(200..208)), [Outcome::Dropped; 8]);
    assert_eq!(bench.stat("circuit_dropped_stores"), 8);
    bench.linger(Direction::Write);
    assert_eq!(bench.operations(), 3);
    assert_eq!(bench.load(&own), [Outcome::Ok; 8]);
    assert_eq!(bench.faulty.harness.found(&own), [true; 8]);
    assert_eq!(bench.lines("writes keep failing").len(), 1);

    bench.fail(Direction::Write, || Fault::Hold);
    bench.clock.advance(SECOND);
    bench.until(Direction::Write, |bench| bench.operations() > 0);
    assert_eq!(bench.stat("circuit_writes"), "half-open");
    bench.linger(Direction::Write);
    assert_eq!(bench.operations(), 1);
    while bench.faulty.engine.held() == 0 {
        std::thread::yield_now();
    }
    // Once the trial has ended, whoever calls the tier stores for real.
    bench.faulty.choose(|_| Fault::None);
    bench.faulty.engine.release();
    bench.until(Direction::Write, |bench| {
        bench.stat("circuit_writes") == "closed"
    });
    assert_eq!(bench.lines("writes work again").len(), 1);
    assert_eq!(bench.store(&keys(200..208)), [Outcome::Ok; 8]);
    assert_eq!(bench.load(&keys(200..208)), [Outcome::Ok; 8]);
    assert_eq!(bench.stat("retired_rows"), 0);
    bench.faulty.harness.tier.close(10 * SECOND).unwrap();
    let root = bench.faulty.root.path();
    let trials: Vec<_> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with("probe."))
        .collect();
    assert!(trials.is_empty(), "{trials:?}");
    assert!(!row_files(root).is_empty());
}

#[test]
fn a_full_disk_a_missing_file_and_wrong_bytes_open_no_circuit() {
    let mut bench = Bench::open();
    let own = keys(0..8);
    bench.store(&own);
    bench.fail(Direction::Write, || Fault::Fail(Failure::Os(libc::ENOSPC)));
    for at in 0..8 {
        assert_eq!(bench.store(&keys([100 + at])), [Outcome::NoSpace]);
    }
    assert_eq!(bench.stat("last_error")["errno"], "ENOSPC");
    bench.faulty.choose(|_| Fault::None);
    spoil(bench.faulty.root.path(), &own);
    for at in 0..8 {
        assert_eq!(bench.load(&own[at..=at]), [Outcome::Corrupt]);
    }
    assert_eq!(bench.store(&own), [Outcome::Ok; 8]);
    bench.fail(Direction::Read, || Fault::Fail(Failure::Os(libc::ENOENT)));
    for at in 0..8 {
        assert_eq!(bench.load(&own[at..=at]), [Outcome::Miss]);
    }
    assert_eq!(bench.stat("circuit_openings"), 0);
    assert_eq!(bench.stat("health"), "ok");
}

/// Overwrites the first bytes of each key's row.
fn spoil(root: &std::path::Path, keys: &[Key]) {
    for path in row_files(root) {
        let mut bytes = std::fs::read(&path).unwrap();
        for key in keys {
            let start = kvstrata_testkit::payload::payload(key.as_bytes(), 64);
            if let Some(at) = bytes.windows(64).position(|window| window == start) {
                bytes.get_mut(at..at + 64).unwrap().fill(7);
            }
        }
        std::fs::write(&path, bytes).unwrap();
    }
}

/// The system's clock, slow to read for the tier's keeper: what may happen between two of its
/// steps has the time to happen.
#[derive(Debug)]
struct SlowClock;

impl Clock for SlowClock {
    fn now(&self) -> Instant {
        if std::thread::current().name() == Some("kvstrata-keeper") {
            std::thread::sleep(Duration::from_millis(20));
        }
        SystemClock.now()
    }

    fn unix_seconds(&self) -> u32 {
        SystemClock.unix_seconds()
    }

    fn sleep(&self, duration: Duration) {
        SystemClock.sleep(duration);
    }
}

#[test]
fn a_deadline_counts_once_for_its_job_and_the_rows_of_the_last_stay() {
    deadlines_count_once(Seams::default());
}

#[test]
fn a_deadline_is_counted_before_any_row_of_its_job_is_dropped() {
    deadlines_count_once(Seams {
        clock: Arc::new(SlowClock),
        ..Seams::default()
    });
}

#[expect(
    clippy::indexing_slicing,
    reason = "a test fails where it is out of bounds"
)]
fn deadlines_count_once(seams: Seams) {
    let seams = Seams {
        circuit: CircuitLimits {
            failures_max: 2,
            pause_first: Duration::from_millis(300),
            pause_max: SECOND,
        },
        ..seams
    };
    let deadline = Duration::from_millis(200);
    let mut faulty = Faulty::open_with(|own| own.deadline = deadline, seams);
    let own = keys(0..16);
    faulty.harness.store_all(&own);
    faulty.fail(Direction::Read, Fault::Stall);
    // Every other row: each job has four operations.
    let first: Vec<_> = own[..8].iter().copied().step_by(2).collect();
    let second: Vec<_> = own[8..].iter().copied().step_by(2).collect();
    assert_eq!(faulty.harness.load(&first), [Outcome::Timeout; 4]);
    assert_eq!(
        faulty.harness.tier.stats().unwrap()["circuit_reads"],
        "closed"
    );
    assert_eq!(faulty.harness.load(&second), [Outcome::Timeout; 4]);
    let stats = faulty.harness.tier.stats().unwrap();
    assert_ne!(stats["circuit_reads"], "closed");
    assert_eq!(stats["last_error"]["errno"], "timeout");
    assert_eq!(faulty.harness.load(&own), [Outcome::Miss; 16]);
    // No call is needed for it to close again.
    faulty.choose(|_| Fault::None);
    let end = Instant::now() + 10 * SECOND;
    while faulty.harness.tier.stats().unwrap()["circuit_reads"] != "closed" {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
    let found = faulty.harness.found(&own);
    assert_eq!(found.iter().filter(|hit| **hit).count(), 12);
    assert_eq!(faulty.harness.load(&own[8..]), [Outcome::Ok; 8]);
}

#[test]
fn loads_that_hang_past_their_deadline_give_reads_up_and_the_others_miss_at_once() {
    let seams = Seams {
        circuit: CircuitLimits {
            failures_max: 2,
            ..CircuitLimits::default()
        },
        ..Seams::default()
    };
    let deadline = Duration::from_millis(200);
    let mut faulty = Faulty::open_with(|own| own.deadline = deadline, seams);
    let own = keys(0..16);
    faulty.harness.store_all(&own);
    faulty.fail(Direction::Read, Fault::Hold);
    let offsets = faulty.harness.offsets(16);
    let tier = &faulty.harness.tier;
    tier.load(1001, &own[..4], &offsets[..4]).unwrap();
    tier.load(1002, &own[4..8], &offsets[4..8]).unwrap();
    let end = Instant::now() + 10 * SECOND;
    while tier.stats().unwrap()["circuit_reads"] == "closed" {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    tier.load(1003, &own[8..], &offsets[8..]).unwrap();
    let results = tier.wait(5 * SECOND).unwrap();
    assert_eq!(results.len(), 1);
    assert_eq!(results[0].outcomes, [Outcome::Miss; 8]);
    assert!(results[0].duration < deadline);
    // What hung keeps its slots until the kernel returns it, and is whole then.
    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    let mut late = Vec::new();
    while late.len() < 2 {
        late.extend(tier.wait(5 * SECOND).unwrap());
    }
    assert!(
        late.iter()
            .all(|result| result.outcomes == [Outcome::Ok; 4])
    );
    assert!(faulty.harness.holds(5, &own[5]));
}

#[test]
fn a_disk_that_fails_every_write_is_told_within_seconds_and_in_few_lines() {
    let faulty = Faulty::open(|_| {});
    let mut harness = faulty.harness;
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    let choose = Fault::Fail(Failure::Os(libc::EACCES));
    *faulty.choose.lock().unwrap() = Box::new(move |operation| match operation.direction {
        Direction::Write => choose,
        Direction::Read => Fault::None,
    });
    harness.tier.take_notices();
    let begun = Instant::now();
    let mut number = 1000;
    while harness.tier.stats().unwrap()["health"] != "degraded" {
        assert!(begun.elapsed() < 5 * SECOND);
        number += 1;
        assert_eq!(harness.store(&keys([number])), [Outcome::IoError]);
    }
    for _ in 0..300 {
        number += 1;
        harness.store(&keys([number]));
    }
    let stats = harness.tier.stats().unwrap();
    assert_eq!(stats["last_error"]["errno"], "EACCES");
    let lines = harness.tier.take_notices();
    let count = |text: &str| lines.iter().filter(|line| line.text.contains(text)).count();
    assert_eq!(count("store failed (EACCES): write of"), 1, "{lines:?}");
    assert_eq!(count("writes keep failing"), 1);
    assert_eq!(lines.len(), 2, "{lines:?}");
}
