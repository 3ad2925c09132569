//! Objects and answers that no engine of ours wrote, and more jobs than a server gets round to.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and measures"
)]

mod object_support;
mod tier_support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvstrata_core::job::Outcome;
use kvstrata_core::key::GroupId;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::tier::CircuitLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{open, open_hasty, open_with, options, row_names};
use tier_support::{Harness, keys};

/// Jobs of one small row each.
const JOBS: usize = 100_000;
/// Three times the time that so many jobs may take to end on a slow machine.
const LATEST: Duration = Duration::from_secs(30);

/// Options with which so many small rows may wait, for a short time.
fn crowded(bucket: &Bucket, deadline: Duration) -> ObjectOptions {
    ObjectOptions {
        deadline,
        row_bytes: BTreeMap::from([(GroupId(0), 512)]),
        ..options(&bucket.endpoint())
    }
}

/// Begins a store of one row for each of so many keys.
fn begin_all(harness: &mut Harness) {
    for key in keys(0..100_000) {
        let job = harness.job();
        harness.tier.store(job, &[key], &[0]).unwrap();
    }
}

/// What all of these jobs end with.
fn ends(harness: &Harness) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    while outcomes.len() < JOBS {
        let results = harness.tier.wait(LATEST).unwrap();
        assert!(!results.is_empty(), "no more than {}", outcomes.len());
        outcomes.extend(results.into_iter().flat_map(|result| result.outcomes));
    }
    outcomes
}

#[test]
fn an_empty_object_at_a_rows_name_is_overwritten_by_a_store() {
    let bucket = Bucket::start().unwrap();
    {
        let mut harness = open(options(&bucket.endpoint()), 4);
        assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    }
    bucket.put(&row_names(&bucket)[0], Vec::new());
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn many_jobs_that_never_started_end_together_at_their_deadline() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open_hasty(crowded(&bucket, Duration::from_secs(2)), JOBS);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Hold));
    let begun = Instant::now();
    begin_all(&mut harness);
    assert_eq!(ends(&harness), vec![Outcome::Timeout; JOBS]);
    assert!(begun.elapsed() < LATEST, "{:?}", begun.elapsed());
    bucket.heal();
}

#[test]
fn many_rows_that_wait_are_removed_in_one_pass() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(crowded(&bucket, Duration::from_mins(1)), JOBS);
    bucket.rule(Rule::rows(&[Method::Put], BucketFault::Hold));
    begin_all(&mut harness);
    let begun = Instant::now();
    harness.tier.remove(&keys(0..100_000)).unwrap();
    assert!(begun.elapsed() < LATEST, "{:?}", begun.elapsed());
    bucket.heal();
    assert_eq!(ends(&harness), vec![Outcome::Dropped; JOBS]);
}

#[test]
fn answers_that_say_they_are_endless_cost_their_requests_alone() {
    let bucket = Bucket::start().unwrap();
    // Its circuit never opens.
    let mut harness = open_hasty(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), [Outcome::Ok; 2]);
    for status in [200, 206, 403, 500] {
        bucket.rule(Rule::all(BucketFault::Endless(status)));
        let outcomes = harness.load(&own);
        assert!(!outcomes.contains(&Outcome::Ok), "{status}: {outcomes:?}");
        harness.store(&keys(2..4));
        harness.tier.lookup(&keys(4..6)).unwrap();
        let other = ObjectOptions {
            required: false,
            ..options(&bucket.endpoint())
        };
        let unusable = open_with(other, 4, None, CircuitLimits::default());
        assert_eq!(unusable.tier.stats().unwrap()["health"], "unusable");
        bucket.heal();
    }
    harness.store_all(&own);
    assert_eq!(harness.load(&own), [Outcome::Ok; 2]);
}

#[test]
fn a_listing_that_says_it_is_endless_fails() {
    let bucket = Bucket::start().unwrap();
    for status in [200, 500] {
        bucket.rule(Rule {
            part: "/rows/0".to_owned(),
            ..Rule::rows(&[Method::List], BucketFault::Endless(status))
        });
        // Opened when its listing has ended or failed.
        let harness = open(options(&bucket.endpoint()), 4);
        let stats = harness.tier.stats().unwrap();
        assert_eq!(stats["last_error"]["operation"], "list", "{status}");
        bucket.heal();
    }
}

#[test]
fn a_server_that_knows_no_ranges_is_read_no_further_than_headers() {
    let bucket = Bucket::start().unwrap();
    bucket.ignore_ranges();
    // More than a socket takes: whoever read it all would wait for all of it.
    let large = ObjectOptions {
        row_bytes: BTreeMap::from([(GroupId(0), 8 << 20)]),
        ..options(&bucket.endpoint())
    };
    let own = keys(0..3);
    {
        let mut harness = open(large.clone(), 3);
        assert_eq!(harness.store(&own), [Outcome::Ok; 3]);
    }
    let names = row_names(&bucket);
    bucket.put(&names[0], Vec::new());
    bucket.put(&names[1], vec![b'x'; 100]);
    let mut harness = open(large, 3);
    let (gets, puts) = (
        bucket.seen(Method::Get, "/rows/"),
        bucket.seen(Method::Put, "/rows/"),
    );
    // Headers are looked at: of what was listed, and of what is said to be there.
    bucket.rule(Rule::rows(
        &[Method::Get],
        BucketFault::Trickle(1 << 20, Duration::from_millis(1)),
    ));
    let mut outcomes = harness.store(&own);
    outcomes.sort_by_key(|outcome| *outcome == Outcome::Present);
    assert_eq!(outcomes, [Outcome::Ok, Outcome::Ok, Outcome::Present]);
    assert_eq!(bucket.seen(Method::Get, "/rows/"), gets + 3);
    assert_eq!(bucket.seen(Method::Put, "/rows/"), puts + 4);
    bucket.heal();
    assert_eq!(harness.load(&own), [Outcome::Ok; 3]);
}
