//! What a server does wrong costs rows, never a wrong byte, and no more time than was given.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, measures and waits"
)]

mod object_support;
mod tier_support;

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_core::tier::CircuitLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{
    eventually, found_in_the_end, open, open_hasty, open_with, options, row_names,
};
use tier_support::{Harness, key, keys};

const DEADLINE: Duration = Duration::from_secs(1);
/// Three times what is promised, for a busy machine may not get round to it; `object_matrix.rs`
/// measures how close it comes.
const LATEST: Duration = Duration::from_millis(3600);

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

/// Options with which another attempt follows quickly.
fn retrying(bucket: &Bucket) -> ObjectOptions {
    let mut retrying = options(&bucket.endpoint());
    retrying.limits.retry_pause = Duration::from_millis(5);
    retrying
}

/// The same with a short deadline, which a busy machine may miss with nothing wrong.
fn hasty(bucket: &Bucket) -> ObjectOptions {
    ObjectOptions {
        deadline: DEADLINE,
        ..retrying(bucket)
    }
}

fn opened(bucket: &Bucket, slots: usize) -> Harness {
    open_hasty(retrying(bucket), slots)
}

/// Loads rows that have to be there: again where a busy machine missed the deadline.
fn load_all(harness: &mut Harness, keys: &[Key]) {
    let mut outcomes = Vec::new();
    for _ in 0..10 {
        outcomes = harness.load(keys);
        let late = |outcome: &Outcome| *outcome == Outcome::Timeout;
        if !outcomes.iter().any(late) {
            break;
        }
    }
    assert_eq!(outcomes, all(Outcome::Ok, keys.len()));
}

/// Every fault, and what loads of a row that is there end with on a machine that is quick enough.
fn faults() -> Vec<(BucketFault, Vec<Outcome>)> {
    use Outcome::{Corrupt, IoError, Miss, Ok, Timeout};
    let ms = Duration::from_millis;
    vec![
        (BucketFault::Latency(ms(200)), vec![Ok]),
        (BucketFault::Latency(ms(3000)), vec![Timeout]),
        (BucketFault::Trickle(2000, ms(10)), vec![Ok]),
        (BucketFault::Trickle(1, ms(500)), vec![Timeout]),
        (BucketFault::Reset, vec![IoError]),
        (BucketFault::ResetHalfway, vec![IoError]),
        // The same: what is asked on that connection next is never answered.
        (BucketFault::SlowClose, vec![Ok, Timeout]),
        (BucketFault::Status(500), vec![IoError]),
        (BucketFault::Status(503), vec![IoError]),
        (BucketFault::Status(429), vec![IoError]),
        (BucketFault::Status(403), vec![Miss]),
        (BucketFault::Status(404), vec![Miss]),
        // The connection is used again, and nobody answers there.
        (BucketFault::EarlyStatus(503), vec![IoError, Timeout]),
        (BucketFault::Truncate, vec![IoError]),
        (BucketFault::Short, vec![Corrupt]),
        (BucketFault::WrongBody, vec![Corrupt]),
        (BucketFault::NeverAnswer, vec![Timeout]),
        (BucketFault::LoseAnswer, vec![IoError]),
    ]
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    let done = work();
    (done, begun.elapsed())
}

/// Does `work` with every fault, several at a time.
fn with_each_fault(work: impl Fn(BucketFault, &[Outcome]) + Sync) {
    let queue = Mutex::new(faults());
    let next = || queue.lock().unwrap().pop();
    thread::scope(|scope| {
        for _ in 0..9 {
            scope.spawn(|| {
                while let Some((fault, expected)) = next() {
                    work(fault, &expected);
                }
            });
        }
    });
}

#[test]
fn a_load_ends_in_time_with_the_right_bytes_or_none_whatever_the_server_does() {
    with_each_fault(|fault, expected| {
        let bucket = Bucket::start().unwrap();
        let own = keys(0..4);
        let mut harness = open_hasty(hasty(&bucket), 8);
        harness.store_all(&own);
        bucket.rule(Rule::rows(&[Method::Get], fault));
        // `load` compares the bytes of every slot with outcome ok.
        let (outcomes, took) = timed(|| harness.load(&own));
        assert!(took <= LATEST, "{fault:?} took {took:?}");
        for outcome in &outcomes {
            let late = *outcome == Outcome::Timeout && took >= DEADLINE;
            assert!(
                late || expected.contains(outcome),
                "{fault:?}: {outcomes:?}"
            );
        }
        // One row may have been answered and its neighbour on the same connection not.
        let found = harness.found(&own);
        for (found, outcome) in found.iter().zip(&outcomes) {
            let was_loaded = *outcome == Outcome::Ok;
            assert_eq!(*found, was_loaded, "{fault:?}: {outcomes:?}");
        }
        bucket.heal();
        assert_eq!(harness.stat("load_bytes_open"), 0, "{fault:?}");
        harness.tier.close(Duration::from_secs(5)).unwrap();
    });
}

#[test]
fn a_store_ends_in_time_and_never_leaves_wrong_bytes_whatever_the_server_does() {
    with_each_fault(|fault, _| {
        let bucket = Bucket::start().unwrap();
        let own = keys(0..4);
        let mut harness = open_hasty(hasty(&bucket), 8);
        bucket.rule(Rule::rows(&[Method::Put], fault));
        let (outcomes, took) = timed(|| harness.store(&own));
        assert!(took <= LATEST, "{fault:?} took {took:?}");
        assert!(outcomes.iter().all(|outcome| *outcome != Outcome::Corrupt));
        bucket.heal();
        // Slots are used again at once: what was still being sent from them is never served.
        harness.wipe();
        harness.store_all(&own);
        load_all(&mut harness, &own);
        harness.tier.close(Duration::from_secs(5)).unwrap();
    });
}

#[test]
fn large_rows_in_either_direction_keep_to_their_deadline_against_peers_that_do_not_read() {
    for fault in [
        BucketFault::NeverAnswer,
        BucketFault::EarlyStatus(503),
        BucketFault::EarlyStatus(403),
        BucketFault::Latency(Duration::from_secs(4)),
        BucketFault::ResetHalfway,
    ] {
        let bucket = Bucket::start().unwrap();
        let mut large = hasty(&bucket);
        for bytes in large.row_bytes.values_mut() {
            *bytes = 32 << 20;
        }
        let mut harness = open_hasty(large, 2);
        bucket.rule(Rule::rows(&[Method::Put], fault));
        // Which bytes they are does not matter, and 32 MiB of others take long to make.
        harness.wipe();
        let job = harness.job();
        harness.tier.store(job, &keys(0..1), &[0]).unwrap();
        let result = harness.result(job);
        assert!(!result.success(), "{fault:?}: {result:?}");
        let took = result.duration;
        assert!(took <= LATEST, "{fault:?} took {took:?}");
        bucket.heal();
        harness.tier.close(Duration::from_secs(5)).unwrap();
    }
}

#[test]
fn three_refusals_for_load_are_sat_out_and_counted() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 4);
    let own = keys(0..1);
    let refusals = BucketFault::Status(503);
    bucket.rule(Rule::rows(&[Method::Put], refusals).times(3));
    assert_eq!(harness.store(&own), [Outcome::Ok]);
    assert_eq!(harness.stat("retries"), 3);
    bucket.rule(Rule::rows(&[Method::Get], refusals).times(3));
    assert_eq!(harness.load(&own), [Outcome::Ok]);
    assert_eq!(harness.stat("retries"), 6);
    bucket.rule(Rule::rows(&[Method::Get], refusals).times(4));
    assert_eq!(harness.load(&own), [Outcome::IoError]);
    assert_eq!(harness.stat("retries"), 9);
}

#[test]
fn further_attempts_are_a_small_part_of_all_requests() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 100);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Status(503)));
    assert_eq!(harness.store(&keys(0..100)), all(Outcome::IoError, 100));
    assert_eq!(harness.stat("retries"), 64);
    assert!(harness.stat("retries_refused") > 0);
    assert_eq!(bucket.seen(Method::Put, "/rows/"), 164);
}

#[test]
fn a_store_whose_answer_was_lost_is_found_to_be_there() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 4);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::LoseAnswer).times(1));
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Present]);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn a_conflict_without_an_object_is_not_taken_for_one() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 4);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Status(409)).times(1));
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(row_names(&bucket).len(), 1);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn a_corrupt_object_is_a_miss_is_deleted_and_heals() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 4);
    let own = keys(0..3);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 3));
    for (at, name) in row_names(&bucket).iter().enumerate() {
        let mut bytes = bucket.get(name).unwrap();
        // In the header, in the payload's middle, at its end.
        let place = [50, 2600, bytes.len() - 1][at];
        bytes[place] ^= 1;
        bucket.put(name, bytes);
    }
    assert_eq!(harness.load(&own), all(Outcome::Corrupt, 3));
    assert_eq!(harness.found(&own), [false; 3]);
    assert_eq!(harness.stat("corrupt_rows"), 3);
    // On a busy machine a deletion may take longer than a load waits for it: then the next load
    // finds the object again.
    for _ in 0..10 {
        if row_names(&bucket).is_empty() {
            break;
        }
        harness.load(&own);
    }
    assert_eq!(harness.load(&own), all(Outcome::Miss, 3));
    assert_eq!(harness.store(&own), all(Outcome::Ok, 3));
    assert_eq!(harness.found(&own), [true; 3]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 3));
}

#[test]
fn an_object_that_is_anothers_is_overwritten_by_a_store_and_not_taken_for_the_row() {
    let bucket = Bucket::start().unwrap();
    {
        let mut harness = opened(&bucket, 4);
        assert_eq!(harness.store(&keys(0..2)), all(Outcome::Ok, 2));
    }
    let names = row_names(&bucket);
    bucket.put(&names[0], bucket.get(&names[1]).unwrap());
    bucket.put(&names[1], b"a stranger's".to_vec());
    let mut harness = opened(&bucket, 4);
    assert_eq!(harness.store(&keys(0..2)), all(Outcome::Ok, 2));
    assert_eq!(harness.stat("healed_objects"), 2);
    assert_eq!(harness.load(&keys(0..2)), all(Outcome::Ok, 2));
}

#[test]
fn a_row_that_was_written_in_another_epoch_is_not_served() {
    let bucket = Bucket::start().unwrap();
    let mut harness = opened(&bucket, 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let name = row_names(&bucket).remove(0);
    let epoch = |harness: &Harness| harness.tier.stats().unwrap()["epoch"].clone();
    let old = epoch(&harness);
    assert!(harness.tier.reset().unwrap());
    let moved = name.replace(old.as_str().unwrap(), epoch(&harness).as_str().unwrap());
    bucket.put(&moved, bucket.get(&name).unwrap());
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Corrupt]);
}

#[test]
fn a_denied_read_is_a_miss_and_counted_and_gives_nothing_up() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(retrying(&bucket), 16);
    let own = keys(0..10);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
    bucket.rule(Rule::rows(
        &[Method::Get, Method::Head],
        BucketFault::Status(403),
    ));
    assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
    assert_eq!(harness.stat("denied_reads"), 10);
    assert_eq!(harness.tier.stats().unwrap()["circuit_reads"], "closed");
}

#[test]
fn a_bucket_that_is_full_or_refuses_writes_costs_stores_and_no_loads() {
    for (status, outcome) in [(507, Outcome::NoSpace), (403, Outcome::IoError)] {
        let bucket = Bucket::start().unwrap();
        let mut harness = open(retrying(&bucket), 16);
        let own = keys(0..4);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
        bucket.rule(Rule::rows(&[Method::Put], BucketFault::Status(status)));
        assert_eq!(harness.store(&keys(10..12)), all(outcome, 2));
        assert_eq!(harness.load(&own), all(Outcome::Ok, 4));
        bucket.heal();
        assert_eq!(harness.store(&keys(10..12)), all(Outcome::Ok, 2));
    }
}

#[test]
fn a_server_that_fails_is_given_up_keeps_its_rows_and_is_taken_up_again() {
    let bucket = Bucket::start().unwrap();
    let circuit = CircuitLimits {
        pause_first: Duration::from_millis(50),
        pause_max: Duration::from_millis(100),
        ..CircuitLimits::default()
    };
    let mut harness = open_with(retrying(&bucket), 16, None, circuit);
    let own = keys(0..10);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
    bucket.rule(Rule::all(BucketFault::Status(500)));
    while harness.tier.stats().unwrap()["circuit_reads"] == "closed" {
        harness.load(&own[..1]);
    }
    while harness.tier.stats().unwrap()["circuit_writes"] == "closed" {
        harness.store(&[key(500, 0)]);
    }
    assert_eq!(harness.tier.stats().unwrap()["health"], "degraded");
    let before = bucket.seen(Method::Get, "/rows/");
    assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
    assert_eq!(harness.found(&own), vec![false; 10]);
    assert_eq!(harness.store(&keys(20..22)), all(Outcome::Dropped, 2));
    assert_eq!(bucket.seen(Method::Get, "/rows/"), before);
    bucket.heal();
    eventually("taken up again", || {
        let stats = harness.tier.stats().unwrap();
        stats["circuit_reads"] == "closed" && stats["circuit_writes"] == "closed"
    });
    // What nobody had to load meanwhile is still believed to be there.
    assert_eq!(harness.found(&own[1..]), vec![true; 9]);
    assert_eq!(harness.load(&own[1..]), all(Outcome::Ok, 9));
    assert_eq!(harness.store(&keys(20..22)), all(Outcome::Ok, 2));
}

#[test]
fn calls_of_the_engine_return_at_once_while_no_request_is_answered() {
    let bucket = Bucket::start().unwrap();
    let mut slow = hasty(&bucket);
    slow.limits = ObjectLimits {
        lookup_wait: Duration::from_millis(100),
        ..slow.limits
    };
    let mut harness = open_hasty(slow, 600);
    bucket.rule(Rule::all(BucketFault::NeverAnswer));
    let own = keys(0..300);
    let (jobs, took) = timed(|| {
        let load = harness.begin_load(&own);
        let store = harness.begin_store_at(300, &keys(300..600));
        harness.tier.lookup(&keys(1000..1300)).unwrap();
        harness.tier.touch(&own).unwrap();
        harness.tier.stats().unwrap();
        harness.tier.poll().unwrap();
        [load, store]
    });
    assert!(took < DEADLINE, "{took:?}");
    let results = harness.results(&jobs);
    for result in &results {
        assert_eq!(result.outcomes, all(Outcome::Timeout, 300));
        assert!(result.duration <= LATEST, "{result:?}");
    }
    assert_eq!(
        found_in_the_end(&harness, &keys(1000..1300)),
        vec![false; 300]
    );
}
