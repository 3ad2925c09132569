//! What every tier promises, kept by the object tier on every server there is to try it on.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod object_support;
mod tier_support;

use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::object::memory_store;
use kvstrata_testkit::Bucket;
use object_support::s3s_server::S3sServer;
use object_support::{found_in_the_end, open, open_given, options};
use tier_support::{Harness, key, keys};

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

/// Opens tiers on one and the same bucket, again and again.
type Open<'open> = &'open dyn Fn(usize) -> Harness;

/// Runs a promise on each kind of server.
fn on_every_server(promise: impl Fn(Open<'_>)) {
    let store = memory_store();
    promise(&|slots| open_given(&store, slots));
    let bucket = Bucket::start().unwrap();
    promise(&|slots| open(options(&bucket.endpoint()), slots));
    let server = S3sServer::start();
    promise(&|slots| open(options(&server.endpoint()), slots));
}

#[test]
fn rows_come_back_after_close_and_reopen_with_every_byte() {
    on_every_server(|open| {
        let mut own: Vec<Key> = keys(0..40);
        own.extend((0..40).map(|number| key(number, 7)));
        {
            let mut harness = open(80);
            assert_eq!(found_in_the_end(&harness, &own), vec![false; 80]);
            assert_eq!(harness.load(&own), all(Outcome::Miss, 80));
            assert_eq!(harness.store(&own), all(Outcome::Ok, 80));
            assert_eq!(harness.found(&own), vec![true; 80]);
            assert_eq!(harness.load(&own), all(Outcome::Ok, 80));
            harness.tier.close(Duration::from_secs(10)).unwrap();
            harness.tier.close(Duration::from_secs(10)).unwrap();
            assert_eq!(harness.tier.poll().unwrap_err().kind(), ErrorKind::Closed);
        }
        let mut harness = open(80);
        assert_eq!(found_in_the_end(&harness, &own), vec![true; 80]);
        assert_eq!(harness.load(&own), all(Outcome::Ok, 80));
        assert_eq!(harness.store(&own[..3]), all(Outcome::Present, 3));
        assert_eq!(harness.load(&keys(1000..1003)), all(Outcome::Miss, 3));
        assert_eq!(harness.stat("corrupt_rows"), 0);
    });
}

#[test]
fn a_reset_hides_everything_also_after_a_restart() {
    on_every_server(|open| {
        let own = keys(0..10);
        {
            let mut harness = open(16);
            assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
            assert!(harness.tier.reset().unwrap());
            assert_eq!(found_in_the_end(&harness, &own), vec![false; 10]);
            assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
            assert_eq!(harness.store(&own[..4]), all(Outcome::Ok, 4));
            assert!(harness.tier.reset().unwrap());
            assert_eq!(harness.store(&own[8..]), all(Outcome::Ok, 2));
            harness.tier.close(Duration::from_secs(10)).unwrap();
        }
        let harness = open(16);
        let mut expected = vec![false; 8];
        expected.extend([true, true]);
        assert_eq!(found_in_the_end(&harness, &own), expected);
    });
}

#[test]
fn removed_rows_are_gone_at_once_and_can_be_stored_again() {
    on_every_server(|open| {
        let own = keys(0..6);
        let mut harness = open(8);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 6));
        harness.tier.remove(&own[..2]).unwrap();
        harness.tier.remove(&keys(900..901)).unwrap();
        let expected = [false, false, true, true, true, true];
        assert_eq!(harness.found(&own), expected);
        object_support::eventually("the objects are deleted", || {
            open(8).tier.lookup(&[]).unwrap();
            let fresh = open(8);
            found_in_the_end(&fresh, &own) == expected
        });
        assert_eq!(harness.store(&own[..2]), all(Outcome::Ok, 2));
        assert_eq!(harness.load(&own), all(Outcome::Ok, 6));
    });
}

#[test]
fn what_one_tier_stores_another_loads() {
    on_every_server(|open| {
        let (mut one, mut other) = (open(16), open(16));
        let own = keys(0..10);
        assert_eq!(one.store(&own), all(Outcome::Ok, 10));
        assert_eq!(other.load(&own), all(Outcome::Ok, 10));
        assert_eq!(other.store(&own), all(Outcome::Present, 10));
        assert_eq!(one.store(&keys(10..12)), all(Outcome::Ok, 2));
        // Without having heard of it, the other finds the rows there.
        assert_eq!(other.store(&keys(10..12)), all(Outcome::Present, 2));
    });
}

#[test]
fn wrong_arguments_begin_nothing_and_a_job_id_is_free_once_polled() {
    on_every_server(|open| {
        let mut harness = open(4);
        let own = keys(0..2);
        let refused = |result: kvstrata_core::error::Result<()>| {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Argument);
        };
        let tier = &harness.tier;
        refused(tier.store(1, &own, &[0]));
        refused(tier.store(1, &own, &[0, 1]));
        refused(tier.load(1, &own, &[0, 1 << 40]));
        refused(tier.load(1, &[own[0], own[0]], &[0, 5000]));
        refused(tier.load(1, &[key(0, 3)], &[0]));
        tier.load(1, &[], &[]).unwrap();
        refused(tier.load(1, &[], &[]));
        let results = tier.wait(Duration::from_secs(10)).unwrap();
        assert_eq!(results.len(), 1);
        assert!(results[0].success() && results[0].outcomes.is_empty());
        assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
        assert_eq!(harness.stat("store_bytes_open"), 0);
        assert_eq!(harness.stat("load_bytes_open"), 0);
    });
}

#[test]
fn closing_ends_every_job_and_touches_no_slot_afterwards() {
    on_every_server(|open| {
        let mut harness = open(300);
        let own = keys(0..300);
        let job = harness.begin_store(&own);
        harness.tier.close(Duration::ZERO).unwrap();
        assert!(harness.tier.wait(Duration::ZERO).is_err(), "job {job}");
        let mut again = open(300);
        let loaded = again.load(&own);
        assert!(
            loaded
                .iter()
                .all(|o| matches!(o, Outcome::Ok | Outcome::Miss))
        );
    });
}
