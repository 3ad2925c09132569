//! What a job of an earlier epoch does when its operations end after a reset.

mod tier_support;

use std::time::Duration;

use kvstrata_core::io::Direction;
use kvstrata_core::job::Outcome;
use kvstrata_testkit::faulty::Fault;
use kvstrata_testkit::payload::payload;
use tier_support::faulty::{CAPACITY, Faulty};
use tier_support::{Harness, ROW_BYTES, key, keys, options};

/// Another text under a key than the one that the harness writes.
fn newer(number: u64) -> Vec<u8> {
    payload(key(number + 1000, 0).as_bytes(), ROW_BYTES)
}

fn holds_newer(harness: &mut Harness, number: u64) -> bool {
    let load = harness.begin_load(&keys([number]));
    assert_eq!(harness.result(load).outcomes, [Outcome::Ok]);
    let mut bytes = vec![0; ROW_BYTES];
    assert!(harness.arena.copy_out(0, &mut bytes));
    bytes == newer(number)
}

#[test]
fn a_store_of_the_old_epoch_that_ends_after_a_reset_publishes_nothing_into_the_new_one() {
    let mut faulty = Faulty::open(|_| {});
    faulty.fail(Direction::Write, Fault::Hold);
    let old = faulty.harness.begin_store(&keys(0..4));
    faulty.wait_held(1);
    assert!(faulty.harness.tier.reset().unwrap());
    faulty.choose(|_| Fault::None);
    // The same keys with other bytes, stored and served while the old write is still under way.
    let offsets = faulty.harness.offsets(12)[10..].to_vec();
    for (at, number) in (10..).zip([0, 1]) {
        assert!(faulty.harness.arena.copy_in(at * ROW_BYTES, &newer(number)));
    }
    let new = faulty.harness.job();
    faulty
        .harness
        .tier
        .store(new, &keys(0..2), &offsets)
        .unwrap();
    assert_eq!(faulty.harness.result(new).outcomes, [Outcome::Ok; 2]);
    faulty.engine.release();
    assert_eq!(faulty.harness.result(old).outcomes, [Outcome::Dropped; 4]);
    let expected = [true, true, false, false];
    assert_eq!(faulty.harness.found(&keys(0..4)), expected);
    assert!(holds_newer(&mut faulty.harness, 0));
    assert!(holds_newer(&mut faulty.harness, 1));
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
    let mut again = Harness::open(options(faulty.root.path(), ROW_BYTES, CAPACITY), 64);
    assert_eq!(again.found(&keys(0..4)), expected);
    assert!(holds_newer(&mut again, 0));
    assert!(holds_newer(&mut again, 1));
}

#[test]
fn a_store_that_was_written_before_a_reset_and_reported_after_it_is_not_found_by_the_next_opener() {
    let mut faulty = Faulty::open(|_| {});
    let old = faulty.harness.begin_store(&keys(0..4));
    faulty.harness.tier.drain().unwrap();
    assert!(faulty.harness.tier.reset().unwrap());
    assert_eq!(faulty.harness.result(old).outcomes, [Outcome::Ok; 4]);
    assert_eq!(faulty.harness.found(&keys(0..4)), [false; 4]);
    faulty.harness.tier.close(Duration::from_secs(10)).unwrap();
    let again = Harness::open(options(faulty.root.path(), ROW_BYTES, CAPACITY), 64);
    assert_eq!(again.found(&keys(0..4)), [false; 4]);
}
