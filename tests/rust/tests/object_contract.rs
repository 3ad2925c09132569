//! What every tier promises, kept by the object tier on every server there is to try it on.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails where these fail"
)]

mod object_support;
mod tier_support;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::object::gc::{GcOptions, run};
use kvstrata_core::object::{HEADER_BYTES, ObjectOptions, Store, memory_store};
use kvstrata_core::sys::clock::SystemClock;
use kvstrata_testkit::Bucket;
use object_store::path::Path;
use object_support::place::Place;
use object_support::s3s_server::S3sServer;
use object_support::servers::Server;
use object_support::{eventually, found_in_the_end, given_options, options};
use tier_support::{key, keys};

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

/// Something that is promised, and the words for it.
type Promise = (&'static str, fn(&Place));

const PROMISES: [Promise; 14] = [
    (
        "rows come back",
        rows_come_back_after_close_and_reopen_with_every_byte,
    ),
    (
        "a reset hides everything",
        a_reset_hides_everything_also_after_a_restart,
    ),
    (
        "an old epoch stays old",
        a_peer_in_an_old_epoch_never_publishes_into_the_new_one,
    ),
    (
        "removed rows are gone",
        removed_rows_are_gone_at_once_and_can_be_stored_again,
    ),
    ("peers share", what_one_tier_stores_another_loads),
    (
        "peers store at once",
        tiers_that_store_the_same_rows_at_a_time_agree,
    ),
    (
        "wrong arguments",
        wrong_arguments_begin_nothing_and_a_job_id_is_free_once_polled,
    ),
    (
        "closing",
        closing_ends_every_job_and_touches_no_slot_afterwards,
    ),
    ("sizes", rows_of_one_byte_and_of_megabytes_come_back),
    (
        "corrupt objects heal",
        a_corrupt_object_is_a_miss_is_deleted_and_heals,
    ),
    (
        "another's object",
        an_object_that_is_anothers_is_overwritten_by_a_store,
    ),
    (
        "vanished objects",
        an_object_that_vanished_is_a_miss_for_everyone_and_heals,
    ),
    (
        "another epoch's object",
        a_row_of_another_epoch_is_not_served,
    ),
    ("gc", what_gc_removes_is_a_miss_and_stored_again),
];

/// Keeps every promise in a bucket, each below a prefix of its own.
fn keep_all(place: impl Fn(ObjectOptions) -> Place) {
    let mut broken = Vec::new();
    for (number, (words, promise)) in PROMISES.into_iter().enumerate() {
        let mut options = given_options();
        // Short: one of the servers makes a file's name of an object's whole name.
        options.location.prefix = format!("promise/{number}");
        let own = place(options);
        // A thread of that name: what it says of its panic tells which promise it was.
        let kept = thread::scope(|scope| {
            let named = thread::Builder::new().name(words.to_owned());
            named.spawn_scoped(scope, || promise(&own)).unwrap().join()
        });
        if kept.is_err() {
            broken.push(words);
        }
    }
    assert!(broken.is_empty(), "broken: {broken:?}");
}

/// The same on a server of this machine.
fn keep_all_at(endpoint: &str) {
    let store = object_support::client(endpoint);
    keep_all(|own| {
        let mut at_server = options(endpoint);
        at_server.location.prefix = own.location.prefix;
        Place::of(at_server, None, Store::clone(&store))
    });
}

#[test]
fn in_memory() {
    let store = memory_store();
    keep_all(|own| Place::of(own, Some(Store::clone(&store)), Store::clone(&store)));
}

#[test]
fn on_the_server_of_these_tests() {
    keep_all_at(&Bucket::start().unwrap().endpoint());
}

#[test]
fn on_s3s() {
    keep_all_at(&S3sServer::start().endpoint());
}

#[test]
fn on_moto() {
    keep_all_at(&Server::moto().endpoint());
}

#[test]
fn on_seaweedfs() {
    keep_all_at(&Server::seaweedfs().endpoint());
}

fn rows_come_back_after_close_and_reopen_with_every_byte(place: &Place) {
    let mut own: Vec<Key> = keys(0..40);
    own.extend((0..40).map(|number| key(number, 7)));
    {
        let mut harness = place.open(80);
        assert_eq!(found_in_the_end(&harness, &own), vec![false; 80]);
        assert_eq!(harness.load(&own), all(Outcome::Miss, 80));
        assert_eq!(harness.store(&own), all(Outcome::Ok, 80));
        assert_eq!(harness.found(&own), vec![true; 80]);
        assert_eq!(harness.load(&own), all(Outcome::Ok, 80));
        harness.tier.close(Duration::from_secs(10)).unwrap();
        harness.tier.close(Duration::from_secs(10)).unwrap();
        assert_eq!(harness.tier.poll().unwrap_err().kind(), ErrorKind::Closed);
    }
    let mut harness = place.open(80);
    assert_eq!(found_in_the_end(&harness, &own), vec![true; 80]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 80));
    assert_eq!(harness.store(&own[..3]), all(Outcome::Present, 3));
    assert_eq!(harness.load(&keys(1000..1003)), all(Outcome::Miss, 3));
    assert_eq!(harness.stat("corrupt_rows"), 0);
}

fn a_reset_hides_everything_also_after_a_restart(place: &Place) {
    let own = keys(0..10);
    {
        let mut harness = place.open(16);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
        assert!(harness.tier.reset().unwrap());
        assert_eq!(found_in_the_end(&harness, &own), vec![false; 10]);
        assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
        assert_eq!(harness.store(&own[..4]), all(Outcome::Ok, 4));
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.store(&own[8..]), all(Outcome::Ok, 2));
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let harness = place.open(16);
    let mut expected = vec![false; 8];
    expected.extend([true, true]);
    assert_eq!(found_in_the_end(&harness, &own), expected);
}

fn a_peer_in_an_old_epoch_never_publishes_into_the_new_one(place: &Place) {
    let (mut old, mut new) = (place.open(4), place.open(4));
    let own = keys(0..2);
    assert_eq!(old.store(&own[..1]), [Outcome::Ok]);
    assert!(new.tier.reset().unwrap());
    assert_eq!(old.store(&own[1..]), [Outcome::Ok]);
    assert_eq!(new.load(&own), all(Outcome::Miss, 2));
    assert_eq!(place.open(4).load(&own), all(Outcome::Miss, 2));
    // The peer itself goes on with what it has.
    assert_eq!(old.load(&own), all(Outcome::Ok, 2));
    assert_eq!(new.store(&own), all(Outcome::Ok, 2));
    assert!(old.tier.reset().unwrap());
    assert_eq!(old.load(&own), all(Outcome::Miss, 2));
    let epoch = old.tier.stats().unwrap()["epoch"].clone();
    assert!(
        epoch.as_str().unwrap().starts_with("0000000003-"),
        "{epoch}"
    );
}

fn removed_rows_are_gone_at_once_and_can_be_stored_again(place: &Place) {
    let own = keys(0..6);
    let mut harness = place.open(8);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 6));
    harness.tier.remove(&own[..2]).unwrap();
    harness.tier.remove(&keys(900..901)).unwrap();
    let expected = [false, false, true, true, true, true];
    assert_eq!(harness.found(&own), expected);
    eventually("the objects are deleted", || {
        let gone = |key| place.read(&place.name(1, key)).is_none();
        own[..2].iter().all(gone)
    });
    assert_eq!(found_in_the_end(&place.open(8), &own), expected);
    assert_eq!(harness.store(&own[..2]), all(Outcome::Ok, 2));
    assert_eq!(harness.load(&own), all(Outcome::Ok, 6));
}

fn what_one_tier_stores_another_loads(place: &Place) {
    let (mut one, mut other) = (place.open(16), place.open(16));
    let own = keys(0..10);
    assert_eq!(one.store(&own), all(Outcome::Ok, 10));
    assert_eq!(other.load(&own), all(Outcome::Ok, 10));
    assert_eq!(other.store(&own), all(Outcome::Present, 10));
    assert_eq!(one.store(&keys(10..12)), all(Outcome::Ok, 2));
    // Without having heard of it, the other finds the rows there.
    assert_eq!(other.store(&keys(10..12)), all(Outcome::Present, 2));
}

fn tiers_that_store_the_same_rows_at_a_time_agree(place: &Place) {
    let mut tiers = [place.open(32), place.open(32), place.open(32)];
    let own = keys(0..32);
    let jobs = tiers.each_mut().map(|tier| tier.begin_store(&own));
    let mut made = [false; 32];
    for (tier, job) in tiers.iter().zip(jobs) {
        let outcomes = tier.result(job).outcomes;
        for (made, outcome) in made.iter_mut().zip(&outcomes) {
            assert!(outcome.is_success(), "{outcomes:?}");
            // By more than one where the server looks first and writes then.
            *made |= *outcome == Outcome::Ok;
        }
    }
    assert_eq!(made, [true; 32]);
    for tier in &mut tiers {
        assert_eq!(tier.load(&own), all(Outcome::Ok, 32));
    }
}

fn wrong_arguments_begin_nothing_and_a_job_id_is_free_once_polled(place: &Place) {
    let mut harness = place.open(4);
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
}

fn closing_ends_every_job_and_touches_no_slot_afterwards(place: &Place) {
    let mut harness = place.open(300);
    let own = keys(0..300);
    let job = harness.begin_store(&own);
    harness.tier.close(Duration::ZERO).unwrap();
    assert!(harness.tier.wait(Duration::ZERO).is_err(), "job {job}");
    let mut again = place.open(300);
    let loaded = again.load(&own);
    assert!(
        loaded
            .iter()
            .all(|o| matches!(o, Outcome::Ok | Outcome::Miss))
    );
}

fn rows_of_one_byte_and_of_megabytes_come_back(place: &Place) {
    for row_bytes in [1, (3 << 20) + 1] {
        let sized = ObjectOptions {
            row_bytes: BTreeMap::from([(GroupId(0), row_bytes)]),
            ..place.options.clone()
        };
        let own = keys(0..3);
        let stored = place.open_as(sized.clone(), 3).store(&own);
        assert_eq!(stored, all(Outcome::Ok, 3), "{row_bytes}");
        let mut harness = place.open_as(sized, 3);
        assert_eq!(harness.load(&own), all(Outcome::Ok, 3), "{row_bytes}");
    }
}

fn a_corrupt_object_is_a_miss_is_deleted_and_heals(place: &Place) {
    let own = keys(0..4);
    let mut harness = place.open(4);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
    let names: Vec<Path> = own.iter().map(|key| place.name(1, key)).collect();
    let sound: Vec<Vec<u8>> = names.iter().map(|name| place.read(name).unwrap()).collect();
    // In the header, in the payload's middle, at its end, and a row of which half is missing.
    let last = sound[0].len() - 1;
    for ((name, bytes), at) in names.iter().zip(&sound).zip([50, 2600, last]) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        place.write(name, bytes);
    }
    place.write(&names[3], sound[3][..2600].to_vec());
    assert_eq!(harness.load(&own), all(Outcome::Corrupt, 4));
    assert_eq!(harness.found(&own), [false; 4]);
    assert_eq!(harness.stat("corrupt_rows"), 4);
    // On a busy machine a deletion may take longer than a load waits for it: then the next load
    // finds the object again.
    let left = || names.iter().any(|name| place.read(name).is_some());
    for _ in 0..10 {
        if !left() {
            break;
        }
        harness.load(&own);
    }
    assert_eq!(harness.load(&own), all(Outcome::Miss, 4));
    assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
    assert_eq!(harness.found(&own), [true; 4]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 4));
    assert_eq!(place.open(4).load(&own), all(Outcome::Ok, 4));
}

fn an_object_that_is_anothers_is_overwritten_by_a_store(place: &Place) {
    let own = keys(0..3);
    assert_eq!(place.open(4).store(&own[..1]), [Outcome::Ok]);
    let row = place.read(&place.name(1, &own[0])).unwrap();
    // Another row's object under its name, and a stranger's.
    place.write(&place.name(1, &own[1]), row);
    place.write(&place.name(1, &own[2]), b"a stranger's".to_vec());
    let mut harness = place.open(4);
    let expected = [Outcome::Present, Outcome::Ok, Outcome::Ok];
    assert_eq!(harness.store(&own), expected);
    assert_eq!(harness.stat("healed_objects"), 2);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 3));
    assert_eq!(place.open(4).load(&own), all(Outcome::Ok, 3));
}

fn an_object_that_vanished_is_a_miss_for_everyone_and_heals(place: &Place) {
    let own = keys(0..3);
    let mut harness = place.open(4);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 3));
    place.delete(&place.name(1, &own[1]));
    assert_eq!(harness.found(&own), [true; 3]);
    let expected = [Outcome::Ok, Outcome::Miss, Outcome::Ok];
    assert_eq!(harness.load(&own), expected);
    assert_eq!(harness.found(&own), [true, false, true]);
    assert_eq!(harness.store(&own[1..2]), [Outcome::Ok]);
    assert_eq!(harness.found(&own), [true; 3]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 3));
}

fn a_row_of_another_epoch_is_not_served(place: &Place) {
    let own = keys(0..1);
    let mut harness = place.open(4);
    assert_eq!(harness.store(&own), [Outcome::Ok]);
    assert!(harness.tier.reset().unwrap());
    let row = place.read(&place.name(1, &own[0])).unwrap();
    place.write(&place.name(2, &own[0]), row);
    assert_eq!(harness.load(&own), [Outcome::Corrupt]);
    assert!(harness.store(&own)[0].is_success());
    assert_eq!(harness.load(&own), [Outcome::Ok]);
}

fn what_gc_removes_is_a_miss_and_stored_again(place: &Place) {
    let own = keys(0..12);
    let mut harness = place.open(12);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 12));
    let whole = u64::try_from(harness.row_bytes + HEADER_BYTES).unwrap();
    let clock: std::sync::Arc<dyn kvstrata_core::sys::clock::Clock> =
        std::sync::Arc::new(SystemClock);
    let what = GcOptions {
        capacity_bytes: Some(5 * whole),
        ..GcOptions::default()
    };
    let given = place.given.as_ref();
    let report = run(&place.options, given, &clock, what, &|| false).unwrap();
    assert_eq!((report.removed_rows, report.kept_rows), (7, 5));
    assert_eq!((report.failed_rows, report.kept_bytes), (0, 5 * whole));
    let loaded = harness.load(&own);
    let count = |wanted| loaded.iter().filter(|outcome| **outcome == wanted).count();
    assert_eq!((count(Outcome::Ok), count(Outcome::Miss)), (5, 7));
    let again = harness.store(&own);
    assert_eq!(again.iter().filter(|o| **o == Outcome::Ok).count(), 7);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 12));
}
