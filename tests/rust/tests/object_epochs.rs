//! What was stored before a reset is never found after it, whoever stored it and wherever.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails where these fail"
)]

mod object_support;
mod tier_support;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::memory_store;
use kvstrata_core::tier::CircuitLimits;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{
    eventually, found_in_the_end, open, open_given, open_with, options, row_names,
};
use tier_support::{Harness, keys};

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

/// The epoch that a tier works in: its number and its random part.
fn whole_epoch(harness: &Harness) -> String {
    let stats = harness.tier.stats().unwrap();
    stats["epoch"].as_str().unwrap().to_owned()
}

/// Its number.
fn epoch(harness: &Harness) -> String {
    let (number, suffix) = {
        let whole = whole_epoch(harness);
        let (number, suffix) = whole.split_once('-').unwrap();
        (number.to_owned(), suffix.to_owned())
    };
    assert_ne!(suffix, "0000000000000000");
    number
}

fn records(bucket: &Bucket) -> Vec<String> {
    let names = bucket.names().into_iter();
    let records = names.filter(|name| name.contains("/epochs/"));
    records
        .map(|name| name.rsplit('/').next().unwrap().to_owned())
        .collect()
}

#[test]
fn a_reset_is_recorded_before_it_says_so_and_takes_the_next_number() {
    let bucket = Bucket::start().unwrap();
    let (one, other) = (
        open(options(&bucket.endpoint()), 4),
        open(options(&bucket.endpoint()), 4),
    );
    assert_eq!(epoch(&one), "0000000001");
    assert_eq!(whole_epoch(&other), whole_epoch(&one));
    assert!(one.tier.reset().unwrap());
    assert_eq!(records(&bucket), ["0000000001", "0000000002"]);
    assert!(other.tier.reset().unwrap());
    assert_eq!(
        (epoch(&one), epoch(&other)),
        ("0000000002".into(), "0000000003".into())
    );
    assert_eq!(epoch(&open(options(&bucket.endpoint()), 4)), "0000000003");
}

#[test]
fn an_epoch_that_begins_while_a_tier_opens_is_not_taken_for_a_lost_one() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let listings = || bucket.seen(Method::List, "/rows/");
    let before = listings();
    bucket.rule(Rule::rows(&[Method::List], BucketFault::Hold).times(1));
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| open(options(&bucket.endpoint()), 4));
        eventually("its rows are being listed", || listings() > before);
        // A peer's reset, and its first row.
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
        bucket.heal();
        assert_eq!(epoch(&opening.join().unwrap()), "0000000002");
    });
    assert_eq!(records(&bucket), ["0000000001", "0000000002"]);
}

#[test]
fn a_reset_that_cannot_be_recorded_serves_nothing_until_one_is() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    let own = keys(0..2);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
    bucket.rule(Rule {
        part: "/epochs/".to_owned(),
        ..Rule::all(BucketFault::Status(403))
    });
    assert!(!harness.tier.reset().unwrap());
    assert_eq!(
        harness.tier.stats().unwrap()["health"],
        "reset not recorded"
    );
    assert_eq!(harness.found(&own), [false; 2]);
    assert_eq!(harness.load(&own), all(Outcome::Miss, 2));
    assert_eq!(harness.store(&keys(5..6)), [Outcome::Dropped]);
    bucket.heal();
    assert!(harness.tier.reset().unwrap());
    assert_eq!(harness.load(&own), all(Outcome::Miss, 2));
    assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
}

#[test]
fn what_is_under_way_during_a_reset_ends_in_nothing() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 16);
    let own = keys(0..4);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
    bucket.rule(Rule::rows(&[Method::Get, Method::Put], BucketFault::Hold));
    let load = harness.begin_load(&own);
    let store = harness.begin_store_at(4, &keys(10..14));
    eventually("under way", || harness.stat("in_flight_operations") == 8);
    assert!(harness.tier.reset().unwrap());
    bucket.heal();
    let results = harness.results(&[load, store]);
    assert_eq!(results[0].outcomes, all(Outcome::Miss, 4));
    assert_eq!(results[1].outcomes, all(Outcome::Dropped, 4));
    let mut everything = own;
    everything.extend(keys(10..14));
    assert_eq!(found_in_the_end(&harness, &everything), vec![false; 8]);
    assert_eq!(harness.load(&everything), all(Outcome::Miss, 8));
}

#[test]
fn lost_records_bring_nothing_back() {
    let bucket = Bucket::start().unwrap();
    let own = keys(0..2);
    {
        let mut harness = open(options(&bucket.endpoint()), 4);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.store(&own[..1]), [Outcome::Ok]);
    }
    let names = bucket.names();
    let lost = names.iter().filter(|name| name.contains("/epochs/"));
    assert_eq!(
        lost.map(|name| bucket.remove(name))
            .filter(|gone| *gone)
            .count(),
        2
    );
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(epoch(&harness), "0000000003");
    assert_eq!(harness.load(&own), all(Outcome::Miss, 2));
}

#[test]
fn an_epoch_never_comes_back_though_its_bucket_was_emptied() {
    for writes_between in [false, true] {
        let bucket = Bucket::start().unwrap();
        let own = keys(0..4);
        let mut old = open(options(&bucket.endpoint()), 4);
        assert_eq!(old.store(&own[..2]), all(Outcome::Ok, 2));
        // What was stored before this must not be found after it.
        let resetting = open(options(&bucket.endpoint()), 4);
        assert!(resetting.tier.reset().unwrap());
        for name in bucket.names() {
            bucket.remove(&name);
        }
        // The old peer still writes rows where it always did.
        if writes_between {
            assert_eq!(old.store(&own[2..3]), [Outcome::Ok]);
        }
        let mut new = open(options(&bucket.endpoint()), 4);
        assert!(old.store(&own[2..]).contains(&Outcome::Ok));
        assert_ne!(whole_epoch(&new), whole_epoch(&old));
        assert_eq!(found_in_the_end(&new, &own), [false; 4]);
        assert_eq!(new.load(&own), all(Outcome::Miss, 4));
        assert_eq!(new.store(&own), all(Outcome::Ok, 4));
        // Whoever comes next shares with the new one.
        let mut next = open(options(&bucket.endpoint()), 4);
        assert_eq!(whole_epoch(&next), whole_epoch(&new));
        assert_eq!(next.load(&own), all(Outcome::Ok, 4));
    }
}

#[test]
fn tiers_that_open_an_empty_bucket_at_the_same_time_share_its_first_epoch() {
    let bucket = Bucket::start().unwrap();
    let open = || whole_epoch(&open(options(&bucket.endpoint()), 4));
    let found: Vec<String> = std::thread::scope(|scope| {
        let opening: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        let opened = opening.into_iter().map(|opened| opened.join().unwrap());
        opened.collect()
    });
    assert!(found.iter().all(|epoch| *epoch == found[0]), "{found:?}");
}

#[test]
fn a_record_that_makes_no_sense_begins_a_new_epoch() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let record = bucket.names().into_iter();
    let record = record.into_iter().find(|name| name.contains("/epochs/"));
    bucket.put(&record.unwrap(), b"something else".to_vec());
    let mut other = open(options(&bucket.endpoint()), 4);
    assert_eq!(epoch(&other), "0000000002");
    assert_eq!(other.load(&keys(0..1)), [Outcome::Miss]);
}

#[test]
fn numbers_that_nobody_can_have_come_to_use_none_up() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let row = row_names(&bucket).remove(0);
    let (own, bytes) = (whole_epoch(&harness), bucket.get(&row).unwrap());
    let (base, _) = row.split_once("/rows/").unwrap();
    for far in ["0100000002", "4000000000"] {
        let of = format!("{far}-00000000000000ff");
        let record = format!(
            "an epoch of kvstrata, {of}; without it rows that were reset could come back\n"
        );
        bucket.put(&format!("{base}/epochs/{far}"), record.into_bytes());
        bucket.put(&row.replace(&own, &of), bytes.clone());
        let mut other = open(options(&bucket.endpoint()), 4);
        assert_eq!(whole_epoch(&other), own, "{far}");
        assert_eq!(other.load(&keys(0..1)), [Outcome::Ok]);
        assert!(other.stat("odd_names") > 0);
    }
    assert!(harness.tier.reset().unwrap());
    assert_eq!(epoch(&harness), "0000000002");
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Miss]);
    // What somebody could have come to counts, however unlikely, and with it what is near that.
    bucket.put(&format!("{base}/epochs/0100000000"), b"x".to_vec());
    assert!(harness.tier.reset().unwrap());
    assert_eq!(epoch(&harness), "0100000003");
}

#[test]
fn many_names_below_rows_cost_an_opening_a_page_of_memory() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let row = row_names(&bucket).remove(0);
    let (rows, _) = row.split_once("/rows/").unwrap();
    for number in 0..5000 {
        bucket.put(&format!("{rows}/rows/{number:06}"), b"x".to_vec());
        bucket.put(&format!("{rows}/rows/zz{number:06}/x"), b"x".to_vec());
    }
    let other = open(options(&bucket.endpoint()), 4);
    assert_eq!(whole_epoch(&other), whole_epoch(&harness));
    // An epoch among them is found, and goes on from there.
    let old = whole_epoch(&harness);
    let later = row.replace(&old, "0000000007-00000000000000ff");
    bucket.put(&later, bucket.get(&row).unwrap());
    assert_eq!(epoch(&open(options(&bucket.endpoint()), 4)), "0000000008");
}

#[test]
fn where_nothing_can_be_refused_epochs_of_two_resets_differ_all_the_same() {
    let bucket = Bucket::start().unwrap();
    bucket.ignore_conditions();
    let (mut one, mut other) = (
        open(options(&bucket.endpoint()), 4),
        open(options(&bucket.endpoint()), 4),
    );
    assert_eq!(one.tier.capabilities().unwrap()["conditional_put"], false);
    assert_eq!(epoch(&one), "0000000001");
    assert_eq!(whole_epoch(&other), whole_epoch(&one));
    assert_eq!(one.store(&keys(0..2)), all(Outcome::Ok, 2));
    // Without having been told: its header is read first.
    assert_eq!(other.store(&keys(0..2)), all(Outcome::Present, 2));
    assert!(one.tier.reset().unwrap() && other.tier.reset().unwrap());
    let both = (epoch(&one), epoch(&other));
    assert_eq!(both, ("0000000002".into(), "0000000003".into()));
    assert_eq!(one.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(other.load(&keys(0..1)), [Outcome::Miss]);
    assert_eq!(one.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn a_reset_of_a_tier_that_has_not_joined_is_made_up_for() {
    let bucket = Bucket::start().unwrap();
    let own = keys(0..1);
    assert_eq!(
        open(options(&bucket.endpoint()), 4).store(&own),
        [Outcome::Ok]
    );
    bucket.rule(Rule::all(BucketFault::Status(500)));
    let mut later = options(&bucket.endpoint());
    later.required = false;
    let mut harness = open_with(later, 4, None, CircuitLimits::default());
    assert_eq!(harness.tier.stats().unwrap()["health"], "unusable");
    assert_eq!(harness.found(&own), [false]);
    assert!(!harness.tier.reset().unwrap());
    bucket.heal();
    eventually("joined", || harness.tier.stats().unwrap()["health"] == "ok");
    assert_eq!(epoch(&harness), "0000000002");
    assert_eq!(harness.load(&own), [Outcome::Miss]);
    assert_eq!(harness.store(&own), [Outcome::Ok]);
}

#[test]
fn a_manifest_that_differs_is_refused_by_its_field() {
    let store = memory_store();
    drop(open_given(&store, 4));
    let bucket = Bucket::start().unwrap();
    drop(open(options(&bucket.endpoint()), 4));
    let name = bucket
        .names()
        .into_iter()
        .find(|name| name.ends_with("namespace.json"))
        .unwrap();
    let text = String::from_utf8(bucket.get(&name).unwrap()).unwrap();
    bucket.put(&name, text.replace("bfloat16", "float32").into_bytes());
    let refused = kvstrata_core::tier::Tier::open_object(
        options(&bucket.endpoint()),
        kvstrata_testkit::memory::leaked(5000, 0).unwrap(),
    );
    let told = refused.unwrap_err().to_string();
    assert!(
        told.contains("namespace.json") && told.contains("digest"),
        "{told}"
    );
}

#[test]
fn a_denied_bucket_is_refused_with_the_tail_of_the_key_alone() {
    let bucket = Bucket::start().unwrap();
    bucket.rule(Rule::all(BucketFault::Status(403)));
    let refused = kvstrata_core::tier::Tier::open_object(
        options(&bucket.endpoint()),
        kvstrata_testkit::memory::leaked(5000, 0).unwrap(),
    );
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("403") && told.contains("...TEST"), "{told}");
    assert!(!told.contains(object_support::ACCESS_KEY));
    assert!(!told.contains(object_support::SECRET_KEY));
}
