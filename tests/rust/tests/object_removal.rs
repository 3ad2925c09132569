//! A removed row is not found again, whatever the server does about its object.
#![expect(clippy::disallowed_methods, reason = "a test waits")]

mod object_support;
mod tier_support;

use std::time::{Duration, Instant};

use kvstrata_core::job::Outcome;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{eventually, found_in_the_end, open, open_hasty, options, row_names};
use tier_support::{Harness, keys};

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

/// A tier that soon forgets what it knows is not there, and then asks again.
fn forgetful(bucket: &Bucket, slots: usize) -> Harness {
    let own = options(&bucket.endpoint());
    open(
        ObjectOptions {
            limits: ObjectLimits {
                absent_for: Duration::from_millis(200),
                retry_pause: Duration::from_millis(5),
                ..own.limits
            },
            ..own
        },
        slots,
    )
}

/// Looks keys up again and again for so long; whether any was found.
fn ever_found(harness: &Harness, time: Duration) -> bool {
    let until = Instant::now() + time;
    while Instant::now() < until {
        if found_in_the_end(harness, &keys(0..4)).contains(&true) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn a_removed_row_stays_away_though_its_deletion_fails_and_is_deleted_in_the_end() {
    let faults = [
        BucketFault::Status(503),
        BucketFault::Status(403),
        BucketFault::Reset,
    ];
    let stays_away = |fault| {
        let bucket = Bucket::start().unwrap();
        let mut harness = forgetful(&bucket, 4);
        let own = keys(0..4);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
        bucket.rule(Rule::rows(&[Method::Delete], fault));
        harness.tier.remove(&own).unwrap();
        eventually("a deletion failed", || harness.stat("failed_deletions") > 0);
        assert!(!ever_found(&harness, Duration::from_secs(1)), "{fault:?}");
        assert_eq!(harness.load(&own), all(Outcome::Miss, 4));
        assert_eq!(row_names(&bucket).len(), 4);
        assert_eq!(harness.stat("queued_deletions"), 4);
        let stats = harness.tier.stats().unwrap();
        assert_eq!(stats["last_error"]["operation"], "delete");
        assert_eq!(stats["circuit_writes"], "closed");
        bucket.heal();
        eventually("they are deleted", || row_names(&bucket).is_empty());
        eventually("and known to be", || harness.stat("queued_deletions") == 0);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
        assert_eq!(harness.found(&own), [true; 4]);
    };
    std::thread::scope(|scope| {
        for fault in faults {
            scope.spawn(move || stays_away(fault));
        }
    });
}

#[test]
fn a_row_that_is_removed_while_it_is_stored_is_not_believed_to_be_there() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    let own = keys(0..4);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Hold));
    let job = harness.begin_store(&own);
    eventually("under way", || harness.stat("in_flight_operations") == 4);
    harness.tier.remove(&own).unwrap();
    bucket.heal();
    assert_eq!(harness.result(job).outcomes, all(Outcome::Dropped, 4));
    eventually("they are deleted", || row_names(&bucket).is_empty());
    eventually("and known to be", || harness.stat("queued_deletions") == 0);
    assert_eq!(harness.found(&own), [false; 4]);
    assert_eq!(harness.load(&own), all(Outcome::Miss, 4));
    assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
    assert_eq!(harness.load(&own), all(Outcome::Ok, 4));
}

#[test]
fn a_row_that_is_removed_while_it_is_loaded_is_not_believed_to_be_there() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    // The answer comes while the row is being removed.
    let slow = BucketFault::Trickle(1000, Duration::from_millis(100));
    bucket.rule(Rule::rows(&[Method::Get], slow));
    let job = harness.begin_load(&own);
    eventually("both are being read", || {
        bucket.seen(Method::Get, "/rows/") == 2
    });
    harness.tier.remove(&own).unwrap();
    harness.result(job);
    bucket.heal();
    eventually("they are deleted", || row_names(&bucket).is_empty());
    assert_eq!(harness.found(&own), [false; 2]);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
}

#[test]
fn many_rows_are_deleted_side_by_side() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 40);
    let own = keys(0..40);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 40));
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Hold));
    harness.tier.remove(&own).unwrap();
    let begun = || bucket.seen(Method::Delete, "/rows/");
    eventually("sixteen at a time", || begun() == 16);
    bucket.heal();
    eventually("they are deleted", || row_names(&bucket).is_empty());
    eventually("each once", || harness.stat("queued_deletions") == 0);
    assert_eq!(begun(), 40);
}

#[test]
fn closing_waits_for_deletions_and_not_for_those_that_fail() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 40);
    assert_eq!(harness.store(&keys(0..40)), all(Outcome::Ok, 40));
    let slow = BucketFault::Latency(Duration::from_millis(50));
    bucket.rule(Rule::rows(&[Method::Delete], slow));
    harness.tier.remove(&keys(0..40)).unwrap();
    harness.tier.close(Duration::from_mins(1)).unwrap();
    assert_eq!(row_names(&bucket).len(), 0);
    bucket.heal();

    let mut harness = open(options(&bucket.endpoint()), 40);
    assert_eq!(harness.store(&keys(0..40)), all(Outcome::Ok, 40));
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(403)));
    harness.tier.remove(&keys(0..40)).unwrap();
    let begun = Instant::now();
    harness.tier.close(Duration::from_mins(1)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn what_is_stored_after_its_removal_stays_however_slow_the_deletion_is() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open_hasty(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Hold));
    harness.tier.remove(&own).unwrap();
    let deletes = || bucket.seen(Method::Delete, "/rows/");
    eventually("both are being deleted", || deletes() == 2);
    // Neither is stored before that is over.
    let puts = || bucket.seen(Method::Put, "/rows/");
    let before = puts();
    let job = harness.begin_store(&own);
    eventually("both wait", || harness.stat("in_flight_operations") == 2);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(puts(), before);
    bucket.heal();
    assert_eq!(harness.result(job).outcomes, all(Outcome::Ok, 2));
    assert_eq!(row_names(&bucket).len(), 2);
    assert_eq!(deletes(), 2);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 2));
}

#[test]
fn a_removed_row_that_waits_and_is_stored_again_is_not_deleted() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(503)).times(2));
    harness.tier.remove(&own).unwrap();
    eventually("a deletion failed", || harness.stat("failed_deletions") > 0);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    eventually("none waits", || harness.stat("queued_deletions") == 0);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(row_names(&bucket).len(), 2);
    assert_eq!(harness.found(&own), [true; 2]);
}

#[test]
fn a_removed_row_is_deleted_though_a_store_of_it_fails() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open_hasty(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    let slow = BucketFault::Latency(Duration::from_millis(100));
    bucket.rule(Rule::rows(&[Method::Delete], slow));
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Status(403)));
    harness.tier.remove(&own).unwrap();
    assert_eq!(harness.store(&own), all(Outcome::IoError, 2));
    eventually("both are deleted", || row_names(&bucket).is_empty());
}
