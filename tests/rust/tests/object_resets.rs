//! Resets, removals and openings beside strangers' objects and odd servers.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and waits"
)]

mod object_support;
mod tier_support;

use std::time::Duration;

use futures_util::StreamExt;
use kvstrata_core::job::Outcome;
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_core::object::{Location, ObjectOptions, Store, memory_store};
use kvstrata_core::tier::CircuitLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use object_support::{
    eventually, found_in_the_end, given_options, listed, open, open_with, options, row_names,
};
use tier_support::{Harness, keys};

/// The number of the epoch that a tier works in.
fn epoch(harness: &Harness) -> u32 {
    let stats = harness.tier.stats().unwrap();
    let (number, _) = stats["epoch"].as_str().unwrap().split_once('-').unwrap();
    number.parse().unwrap()
}

/// Whether a tier's bucket is in use.
fn is_usable(harness: &Harness) -> bool {
    harness.tier.stats().unwrap()["health"] == "ok"
}

/// A tier whose bucket cannot be used, and will be when the faults are over.
fn open_unusable(bucket: &Bucket, deadline: Duration) -> Harness {
    bucket.rule(Rule::all(BucketFault::Status(503)));
    let own = ObjectOptions {
        required: false,
        deadline,
        ..options(&bucket.endpoint())
    };
    let harness = open_with(own, 4, None, CircuitLimits::default());
    assert!(!is_usable(&harness));
    harness
}

#[test]
fn a_reset_that_is_made_up_for_is_tried_again_where_it_is_never_answered() {
    let bucket = Bucket::start().unwrap();
    drop(open(options(&bucket.endpoint()), 4));
    let harness = open_unusable(&bucket, Duration::from_secs(3));
    assert!(!harness.tier.reset().unwrap());
    let records = || bucket.seen(Method::Put, "/epochs/");
    let before = records();
    bucket.heal();
    bucket.rule(
        Rule {
            part: "/epochs/".to_owned(),
            methods: vec![Method::Put],
            ..Rule::all(BucketFault::NeverAnswer)
        }
        .times(1),
    );
    eventually("it is tried", || records() > before);
    eventually("it is in use", || is_usable(&harness));
    assert!(epoch(&harness) >= 2);
}

#[test]
fn what_is_removed_before_the_bucket_is_in_use_stays_away() {
    let bucket = Bucket::start().unwrap();
    let mut other = open(options(&bucket.endpoint()), 4);
    assert_eq!(other.store(&keys(0..4)), [Outcome::Ok; 4]);
    let mut harness = open_unusable(&bucket, Duration::from_secs(20));
    harness.tier.remove(&keys(0..2)).unwrap();
    bucket.heal();
    eventually("it is in use", || is_usable(&harness));
    let found = found_in_the_end(&harness, &keys(0..4));
    assert_eq!(found, [false, false, true, true]);
    eventually("they are deleted", || row_names(&bucket).len() == 2);
    eventually("and known to be", || harness.stat("queued_deletions") == 0);
    assert_eq!(harness.store(&keys(0..2)), [Outcome::Ok; 2]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
}

#[test]
fn a_listing_that_began_before_an_object_was_deleted_says_nothing_of_it() {
    let bucket = Bucket::start().unwrap();
    let own = options(&bucket.endpoint());
    let mut harness = open(
        ObjectOptions {
            limits: ObjectLimits {
                list_every: Duration::from_millis(100),
                ..own.limits
            },
            ..own
        },
        4,
    );
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(503)).times(1));
    harness.tier.remove(&keys(0..1)).unwrap();
    // Longer than the unit in which it is known since when.
    std::thread::sleep(Duration::from_millis(300));
    let (before, listings) = (
        bucket.seen(Method::List, "/rows/"),
        harness.stat("complete_listings"),
    );
    // The listing that has seen the row is not over when the row is gone.
    let slowly = BucketFault::Trickle(100, Duration::from_millis(500));
    bucket.rule(Rule::rows(&[Method::List], slowly).times(1));
    harness.found(&keys(0..1));
    eventually("listed", || bucket.seen(Method::List, "/rows/") > before);
    assert_eq!(row_names(&bucket).len(), 1);
    eventually("deleted", || harness.stat("queued_deletions") == 0);
    eventually("read", || {
        harness.tier.lookup(&keys(0..1)).unwrap();
        harness.stat("complete_listings") > listings
    });
    assert_eq!(harness.found(&keys(0..1)), [false]);
}

#[test]
fn a_server_that_lists_from_the_start_whatever_it_is_asked_finds_the_newest_epoch() {
    let bucket = Bucket::start().unwrap();
    {
        let mut harness = open(options(&bucket.endpoint()), 4);
        assert_eq!(harness.store(&keys(0..2)), [Outcome::Ok; 2]);
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.store(&keys(0..2)), [Outcome::Ok; 2]);
    }
    bucket.list_from_the_start();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(
        (epoch(&harness), harness.load(&keys(0..2))),
        (2, vec![Outcome::Ok; 2])
    );
    let records = bucket
        .names()
        .into_iter()
        .filter(|name| name.contains("/epochs/"));
    for record in records {
        bucket.remove(&record);
    }
    assert_eq!(epoch(&open(options(&bucket.endpoint()), 4)), 3);
}

fn names(store: &Store) -> Vec<Path> {
    let listed = now(store.list(None).collect::<Vec<_>>());
    listed
        .into_iter()
        .map(|meta| meta.unwrap().location)
        .collect()
}

fn now<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(work)
}

fn opened(store: &Store, prefix: &str) -> Harness {
    let own = ObjectOptions {
        location: Location::parse(&format!("memory://bucket/{prefix}"))
            .unwrap()
            .unwrap(),
        ..given_options()
    };
    listed(open_with(
        own,
        4,
        Some(Store::clone(store)),
        CircuitLimits::default(),
    ))
}

#[test]
fn copies_of_records_that_a_stranger_keeps_among_them_are_none() {
    let store = memory_store();
    let mut harness = opened(&store, "p");
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let all = names(&store);
    let record = all
        .iter()
        .find(|name| name.as_ref().contains("/epochs/"))
        .unwrap();
    let epochs = record.as_ref().strip_suffix("/0000000001").unwrap();
    for name in [
        "old/0000000009",
        "0000000001/0000000007",
        "old/0000000009-00000000000000ab",
        "4294967295",
    ] {
        let name = Path::from(format!("{epochs}/{name}"));
        now(store.put(&name, "copy".into())).unwrap();
    }
    assert_eq!(opened(&store, "p").load(&keys(0..1)), [Outcome::Ok]);
    assert!(harness.tier.reset().unwrap());
    assert_eq!((epoch(&harness), epoch(&opened(&store, "p"))), (2, 2));
}

#[test]
fn epochs_whose_records_were_lost_are_found_below_every_prefix() {
    for prefix in ["p", "~me/a b", "\u{fc}ber/50%", "a*b/[x]{y}^`|"] {
        let store = memory_store();
        {
            let mut harness = opened(&store, prefix);
            assert!(harness.tier.reset().unwrap());
            assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
        }
        for name in names(&store) {
            if name.as_ref().contains("/epochs/") {
                now(store.delete(&name)).unwrap();
            }
        }
        let mut again = opened(&store, prefix);
        assert_eq!(epoch(&again), 3, "{prefix}");
        assert_eq!(again.load(&keys(0..1)), [Outcome::Miss], "{prefix}");
    }
}
