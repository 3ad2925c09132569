//! Whose a slot is: a store's until nothing reads it any more, whatever becomes of its key.

mod tier_support;

use std::time::Duration;

use kvstrata_core::io::{Direction, Engine};
use kvstrata_core::job::Outcome;
use kvstrata_testkit::faulty::Fault;
use tier_support::faulty::Faulty;
use tier_support::keys;

#[test]
fn a_write_behind_a_stalled_device_keeps_its_slot_though_its_key_is_removed() {
    let mut faulty = Faulty::open(|_| {});
    let (first, second) = (keys([1]), keys([2]));
    faulty.fail(Direction::Write, Fault::Stall);
    let store = faulty.harness.begin_store(&first);
    while faulty.engine.queue().queued_writes == 0 {
        std::thread::yield_now();
    }
    faulty.harness.tier.remove(&first).unwrap();
    assert_eq!(faulty.harness.found(&first), [false]);
    let early = faulty
        .harness
        .tier
        .wait(Duration::from_millis(300))
        .unwrap();
    assert!(early.is_empty(), "the slot was given back: {early:?}");
    let drained = faulty.harness.tier.drain_for(Duration::ZERO).unwrap();
    assert!(!drained);

    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    let result = faulty.harness.result(store);
    assert_eq!(result.outcomes, [Outcome::Dropped]);
    // The same slot for another key, now that it is the caller's again.
    assert_eq!(faulty.harness.store(&second), [Outcome::Ok]);
    assert_eq!(faulty.harness.found(&first), [false]);
    assert_eq!(faulty.harness.load(&first), [Outcome::Miss]);
    assert_eq!(faulty.harness.load(&second), [Outcome::Ok]);
    faulty.harness.assert_quiet();
}
