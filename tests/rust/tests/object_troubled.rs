//! A client that panics, and one that is slow to look: neither takes a tier, or its caller, with it.

mod object_support;
mod tier_support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::{ObjectOptions, Store};
use kvstrata_core::tier::CircuitLimits;
use object_support::troubled::{Trouble, Troubled};
use object_support::{eventually, found_in_the_end, given_options, listed, open_with};
use tier_support::{Harness, keys};

fn opened(store: &Arc<Troubled>, slots: usize) -> Harness {
    let mut own = given_options();
    own.limits.absent_for = Duration::from_millis(200);
    own.limits.list_every = Duration::from_millis(100);
    open_troubled(store, own, slots)
}

fn open_troubled(store: &Arc<Troubled>, options: ObjectOptions, slots: usize) -> Harness {
    let given: Store = Arc::<Troubled>::clone(store);
    // Nothing is given up: each request is made.
    let patient = CircuitLimits {
        failures_max: u32::MAX,
        ..CircuitLimits::default()
    };
    listed(open_with(options, slots, Some(given), patient))
}

#[test]
fn a_client_that_panics_costs_its_requests_and_nothing_after_them() {
    let store = Arc::new(Troubled::new());
    let mut harness = opened(&store, 4);
    let own = keys(0..4);
    assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
    store.set(Trouble::Panics);
    // More than are asked for at a time.
    let many = keys(10..110);
    assert_eq!(found_in_the_end(&harness, &many), [false; 100]);
    harness.tier.remove(&keys(0..2)).unwrap();
    eventually("not deleted", || harness.stat("failed_deletions") > 0);
    let loaded = harness.load(&keys(2..4));
    assert!(!loaded.contains(&Outcome::Ok), "{loaded:?}");
    let stored = harness.store(&keys(4..6));
    assert!(!stored.contains(&Outcome::Ok), "{stored:?}");
    assert!(!harness.tier.reset().unwrap());
    store.set(Trouble::None);
    assert!(harness.tier.reset().unwrap());
    let before = harness.stat("complete_listings");
    assert_eq!(found_in_the_end(&harness, &many), [false; 100]);
    eventually("listed again", || {
        harness.tier.lookup(&many).unwrap();
        harness.stat("complete_listings") > before
    });
    assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 4]);
    harness.tier.remove(&own).unwrap();
    eventually("deleted", || harness.stat("queued_deletions") == 0);
    harness.tier.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_deletion_that_panics_is_tried_again() {
    let store = Arc::new(Troubled::new());
    let mut harness = opened(&store, 4);
    let own = keys(0..4);
    assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
    store.set(Trouble::Panics);
    harness.tier.remove(&own).unwrap();
    eventually("not deleted", || harness.stat("failed_deletions") > 0);
    store.set(Trouble::None);
    eventually("deleted", || harness.stat("queued_deletions") == 0);
    assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
}

#[test]
fn a_tier_that_closes_while_it_resets_ends_both() {
    let store = Arc::new(Troubled::new());
    let harness = open_troubled(&store, given_options(), 4);
    store.set(Trouble::SlowToLook(Duration::from_millis(300)));
    std::thread::scope(|scope| {
        let resetting = scope.spawn(|| harness.tier.reset());
        eventually("it asks for the epochs", || {
            store.listings.load(Ordering::SeqCst) > 0
        });
        harness.tier.close(Duration::ZERO).unwrap();
        assert_eq!(resetting.join().unwrap().ok(), Some(false));
    });
}
