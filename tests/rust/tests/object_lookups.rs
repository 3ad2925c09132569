//! Lookups cost the engine no round trip, and the server few.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod object_support;
mod tier_support;

use std::time::Duration;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::tier::CircuitLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{eventually, found_in_the_end, open, open_with, options, row_names};
use tier_support::{Harness, keys};

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

fn stored(bucket: &Bucket, count: u64) {
    let mut harness = open(options(&bucket.endpoint()), usize::try_from(count).unwrap());
    let own = keys(0..count);
    assert!(
        harness
            .store(&own)
            .iter()
            .all(|outcome| *outcome == Outcome::Ok)
    );
}

/// A tier whose listings fail: it has to ask for every key. The names of epochs, which are listed
/// once at open, are not kept from it.
fn unlisted(bucket: &Bucket, options: ObjectOptions) -> Harness {
    bucket.rule(Rule {
        part: "/rows/0".to_owned(),
        ..Rule::rows(&[Method::List], BucketFault::Status(403))
    });
    open(options, 4)
}

#[test]
fn what_was_stored_here_is_known_without_asking() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 16);
    assert_eq!(harness.store(&keys(0..10)), all(Outcome::Ok, 10));
    assert_eq!(harness.found(&keys(0..10)), vec![true; 10]);
    assert_eq!(bucket.seen(Method::Head, "/rows/"), 0);
}

#[test]
fn a_namespace_that_was_listed_answers_for_all_its_keys_without_another_request() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 30);
    let harness = open(options(&bucket.endpoint()), 4);
    eventually("listed", || harness.stat("complete_listings") == 1);
    let mut expected = vec![true; 30];
    expected.extend(vec![false; 30]);
    assert_eq!(harness.found(&keys(0..60)), expected);
    assert_eq!(bucket.seen(Method::Head, "/rows/"), 0);
    assert_eq!(harness.stat("listed_names"), 30);
}

#[test]
fn a_bucket_that_is_in_use_only_later_is_listed_then() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 3);
    bucket.rule(Rule::all(BucketFault::Status(500)));
    let later = ObjectOptions {
        required: false,
        ..options(&bucket.endpoint())
    };
    let harness = open_with(later, 4, None, CircuitLimits::default());
    assert_eq!(harness.tier.stats().unwrap()["health"], "unusable");
    bucket.heal();
    eventually("listed", || harness.stat("complete_listings") == 1);
    assert_eq!(harness.found(&keys(0..3)), [true; 3]);
}

#[test]
fn a_namespace_of_many_pages_is_listed_in_parts_and_no_name_is_missed() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 1);
    let one = row_names(&bucket).remove(0);
    let bytes = bucket.get(&one).unwrap();
    let base = one.rsplitn(3, '/').nth(2).unwrap().to_owned();
    let own = keys(0..9000);
    for key in &own {
        let fan_out = kvstrata_core::object::names::fan_out(key);
        bucket.put(&format!("{base}/{fan_out:02x}/{key:?}"), bytes.clone());
    }
    let harness = open(options(&bucket.endpoint()), 4);
    eventually("listed", || harness.stat("complete_listings") == 1);
    assert_eq!(harness.found(&own), vec![true; 9000]);
    assert!(bucket.seen(Method::List, "/rows/") > 9);
}

#[test]
fn unknown_keys_are_asked_for_once_however_often_they_are_looked_up() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 5);
    bucket.rule(Rule::rows(&[Method::Head], BucketFault::Hold));
    let harness = unlisted(&bucket, options(&bucket.endpoint()));
    let asked = keys(0..10);
    for _ in 0..20 {
        assert_eq!(harness.tier.lookup(&asked).unwrap(), [None; 10]);
    }
    bucket.heal();
    let mut expected = vec![true; 5];
    expected.extend(vec![false; 5]);
    assert_eq!(found_in_the_end(&harness, &asked), expected);
    assert_eq!(bucket.seen(Method::Head, "/rows/"), 10);
    assert_eq!(harness.stat("head_requests"), 10);
}

#[test]
fn a_lookup_that_gets_no_answer_is_a_miss_after_its_bound() {
    let bucket = Bucket::start().unwrap();
    let mut options = options(&bucket.endpoint());
    options.limits.lookup_wait = Duration::from_millis(50);
    let harness = unlisted(&bucket, options);
    bucket.rule(Rule::rows(&[Method::Head], BucketFault::NeverAnswer));
    assert_eq!(harness.tier.lookup(&keys(0..3)).unwrap(), [None; 3]);
    assert_eq!(found_in_the_end(&harness, &keys(0..3)), [false; 3]);
    assert!(harness.stat("late_lookups") >= 3);
}

#[test]
fn an_answer_that_takes_longer_than_it_is_believed_is_an_answer() {
    let bucket = Bucket::start().unwrap();
    let mut options = options(&bucket.endpoint());
    options.limits.absent_for = Duration::from_millis(200);
    let harness = unlisted(&bucket, options);
    let slow = BucketFault::Latency(Duration::from_millis(600));
    bucket.rule(Rule::rows(&[Method::Head], slow));
    assert_eq!(found_in_the_end(&harness, &keys(0..1)), [false]);
}

#[test]
fn more_unknown_keys_than_may_be_asked_for_are_misses() {
    let bucket = Bucket::start().unwrap();
    let mut options = options(&bucket.endpoint());
    options.limits.asked_max = 10;
    let harness = unlisted(&bucket, options);
    bucket.rule(Rule::rows(&[Method::Head], BucketFault::NeverAnswer));
    let found = harness.tier.lookup(&keys(0..100)).unwrap();
    assert_eq!(found.iter().filter(|answer| answer.is_none()).count(), 10);
    assert_eq!(harness.stat("asked_keys"), 10);
}

#[test]
fn an_object_that_vanished_is_a_miss_at_once_for_everyone_and_heals() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    let before = bucket.seen(Method::Get, "/rows/");
    for name in row_names(&bucket) {
        assert!(bucket.remove(&name));
    }
    assert_eq!(harness.found(&own), [true; 2]);
    assert_eq!(harness.load(&own), all(Outcome::Miss, 2));
    assert_eq!(harness.found(&own), [false; 2]);
    assert_eq!(bucket.seen(Method::Get, "/rows/") - before, 2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    assert_eq!(harness.found(&own), [true; 2]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 2));
}

#[test]
fn an_answer_that_was_on_its_way_does_not_undo_a_store() {
    let bucket = Bucket::start().unwrap();
    let mut harness = unlisted(&bucket, options(&bucket.endpoint()));
    bucket.rule(Rule::rows(&[Method::Head], BucketFault::Hold));
    let own = keys(0..1);
    assert_eq!(harness.tier.lookup(&own).unwrap(), [None]);
    eventually("asked", || bucket.seen(Method::Head, "/rows/") == 1);
    // The server makes up its mind only afterwards; what it says then is of before the store as far
    // as anybody here can know.
    assert_eq!(harness.store(&own), [Outcome::Ok]);
    bucket.remove(&row_names(&bucket)[0]);
    bucket.heal();
    eventually("answered", || harness.stat("asked_keys") == 0);
    assert_eq!(harness.found(&own), [true]);
}

#[test]
fn what_a_peer_stored_is_found_once_absence_is_no_longer_believed() {
    let bucket = Bucket::start().unwrap();
    let mut options = options(&bucket.endpoint());
    options.limits.absent_for = Duration::from_millis(200);
    let reader = open(options, 4);
    let own = keys(0..2);
    assert_eq!(found_in_the_end(&reader, &own), [false; 2]);
    stored(&bucket, 2);
    eventually("found", || {
        let found = reader.tier.lookup(&own).unwrap();
        found == [Some(true), Some(true)]
    });
}

#[test]
fn a_server_that_is_gone_leaves_verdicts_as_they_are() {
    let bucket = Bucket::start().unwrap();
    let circuit = CircuitLimits {
        failures_max: 3,
        pause_first: Duration::from_millis(50),
        pause_max: Duration::from_millis(50),
    };
    let mut quick = options(&bucket.endpoint());
    // What is not there is asked for again and again.
    quick.limits.absent_for = Duration::from_millis(100);
    let mut harness: Harness = open_with(quick, 16, None, circuit);
    assert_eq!(harness.store(&keys(0..10)), all(Outcome::Ok, 10));
    bucket.rule(Rule::all(BucketFault::Reset));
    eventually("given up", || {
        harness.tier.lookup(&keys(100..110)).unwrap();
        harness.tier.stats().unwrap()["circuit_reads"] != "closed"
    });
    assert_eq!(harness.found(&keys(0..10)), vec![false; 10]);
    bucket.heal();
    eventually("taken up", || {
        harness.tier.stats().unwrap()["circuit_reads"] == "closed"
    });
    assert_eq!(harness.found(&keys(0..10)), vec![true; 10]);
}

#[test]
fn nothing_is_listed_while_nobody_looks_anything_up() {
    let bucket = Bucket::start().unwrap();
    let mut quick = options(&bucket.endpoint());
    quick.limits.list_every = Duration::from_millis(20);
    let harness = open(quick, 4);
    eventually("listed once", || harness.stat("complete_listings") == 1);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(harness.stat("complete_listings"), 1);
    harness.tier.lookup(&keys(0..1)).unwrap();
    eventually("listed again", || harness.stat("complete_listings") == 2);
}
