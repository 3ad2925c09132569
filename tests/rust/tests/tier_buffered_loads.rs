//! Loads through the tier's own buffers, where reads can hang and a caller reuses a slot as soon as
//! its job ends.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvstrata_core::io::Direction;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::GroupId;
use kvstrata_testkit::faulty::Fault;
use tier_support::faulty::{Faulty, Mount};
use tier_support::{ROW_BYTES, key, keys};

fn soon_late(own: &mut kvstrata_core::config::TierOptions) {
    own.deadline = Duration::from_millis(300);
}

/// Whether every byte of these slots is 7.
fn all_sevens(faulty: &Faulty, first: usize, count: usize) -> bool {
    let bytes = faulty
        .harness
        .arena
        .bytes(first * ROW_BYTES, count * ROW_BYTES);
    bytes.unwrap().iter().all(|byte| *byte == 7)
}

#[test]
fn a_load_that_hangs_ends_at_its_deadline_and_its_slot_is_never_written_again() {
    let mut faulty = Faulty::open_on(Mount::MayHang, 64, soon_late);
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    let load = faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    let result = faulty.harness.result(load);
    assert_eq!(result.outcomes, [Outcome::Timeout; 4]);
    assert_eq!(result.busy, Vec::<usize>::new());
    assert!(faulty.harness.tier.busy_offsets().unwrap().is_empty());
    assert!(faulty.harness.tier.drain_for(Duration::ZERO).unwrap());
    assert_eq!(faulty.harness.found(&own), [false; 4]);
    assert_eq!(faulty.harness.stat("stuck_load_buffer_bytes"), 32768);

    assert!(faulty.harness.arena.copy_in(0, &vec![7; 4 * ROW_BYTES]));
    faulty.engine.release();
    while faulty.harness.stat("load_buffer_bytes") > 0 {
        std::thread::yield_now();
    }
    assert!(all_sevens(&faulty, 0, 4), "a late read wrote to its slots");
    assert_eq!(faulty.harness.stat("stuck_load_buffer_bytes"), 0);
    assert_eq!(faulty.harness.stat("corrupt_rows"), 0);
    faulty.choose(|_| Fault::None);
    faulty.harness.store_all(&own);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 4]);
    faulty.harness.assert_quiet();
}

#[test]
fn who_waits_for_a_hanging_read_misses_when_it_is_given_up() {
    let mut faulty = Faulty::open_on(Mount::MayHang, 64, soon_late);
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    let first = faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_millis(100));
    let second = faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]);
    let results = faulty.harness.results(&[first, second]);
    assert_eq!(results[0].outcomes, [Outcome::Timeout; 4]);
    assert_eq!(results[1].outcomes, [Outcome::Miss; 4]);
    assert!(faulty.harness.arena.copy_in(0, &vec![7; 8 * ROW_BYTES]));
    faulty.engine.release();
    while faulty.harness.stat("load_buffer_bytes") > 0 {
        std::thread::yield_now();
    }
    assert!(all_sevens(&faulty, 0, 8));
    faulty.harness.assert_quiet();
}

#[test]
fn while_too_many_reads_are_stuck_nothing_is_found_and_afterwards_no_row_is_lost() {
    let mut faulty = Faulty::open_on(Mount::MayHang, 64, soon_late);
    let (stuck, own) = (keys(0..16), keys(100..104));
    faulty.harness.store_all(&own);
    // Rows of separate stores with others between them are read by separate operations.
    for (at, key) in stuck.iter().enumerate() {
        let between = keys([1000 + u64::try_from(at).unwrap()]);
        faulty.harness.store_all(&[*key]);
        faulty.harness.store_all(&between);
    }
    let read_bytes = faulty.hold_reads();
    let slots: Vec<usize> = (0..16).collect();
    let job = faulty.harness.begin_load_at(&stuck, &slots);
    assert_eq!(
        faulty.harness.result(job).outcomes,
        vec![Outcome::Timeout; 16]
    );
    faulty.wait_held(16);
    let before = read_bytes.load(Ordering::SeqCst);
    assert_eq!(faulty.harness.found(&own), [false; 4]);
    let job = faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Miss; 4]);
    assert_eq!(read_bytes.load(Ordering::SeqCst), before);
    assert_eq!(faulty.harness.stat("refused_loads"), 4);
    faulty.engine.release();
    while faulty.harness.stat("load_buffer_bytes") > 0 {
        std::thread::yield_now();
    }
    faulty.choose(|_| Fault::None);
    assert_eq!(faulty.harness.found(&own), [true; 4]);
    assert_eq!(faulty.harness.load(&own), [Outcome::Ok; 4]);
    assert_eq!(faulty.harness.found(&stuck), vec![false; 16]);
    faulty.harness.assert_quiet();
}

/// Rows of 2 MiB: eight of them are as much as is read at a time.
fn open_wide(slots: usize, deadline: Duration) -> Faulty {
    Faulty::open_on(Mount::MayHang, slots, move |own| {
        own.row_bytes = BTreeMap::from([(GroupId(0), 2 << 20)]);
        own.capacity = kvstrata_core::config::Size::Bytes(2 << 30);
        own.deadline = deadline;
    })
}

#[test]
fn reads_beyond_the_buffers_wait_their_turn() {
    let mut faulty = open_wide(10, Duration::from_secs(30));
    let own = keys(0..10);
    faulty.harness.store_all(&own);
    let read_bytes = faulty.hold_reads();
    let slots: Vec<usize> = (0..10).collect();
    faulty.harness.wipe();
    let job = faulty.harness.begin_load_at(&own, &slots);
    faulty.wait_held(8);
    assert_eq!(read_bytes.load(Ordering::SeqCst), 16 << 20);
    assert_eq!(faulty.harness.stat("load_buffer_bytes"), 16 << 20);
    faulty.choose(|_| Fault::None);
    faulty.engine.release();
    assert_eq!(faulty.harness.result(job).outcomes, vec![Outcome::Ok; 10]);
    assert!((0..10).all(|slot| faulty.harness.holds(slot, &own[slot])));
    faulty.harness.assert_quiet();
}

#[test]
fn reads_that_wait_for_a_buffer_end_at_their_deadline_and_let_their_rows_go() {
    let mut faulty = open_wide(10, Duration::from_secs(2));
    let own = keys(0..10);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    let slots: Vec<usize> = (0..10).collect();
    let first = faulty.harness.begin_load_at(&own, &slots);
    faulty.wait_held(8);
    let result = faulty.harness.result(first);
    assert_eq!(result.outcomes, vec![Outcome::Timeout; 10]);
    assert_eq!(faulty.harness.stat("rows_being_read"), 0);
    assert_eq!(faulty.harness.stat("stuck_load_buffer_bytes"), 16 << 20);
    faulty.engine.release();
    while faulty.harness.stat("load_buffer_bytes") > 0 {
        std::thread::yield_now();
    }
    faulty.choose(|_| Fault::None);
    faulty.harness.store_all(&own);
    assert_eq!(faulty.harness.load(&own), vec![Outcome::Ok; 10]);
    faulty.harness.assert_quiet();
}

#[test]
fn a_tier_closes_although_reads_hang_and_leaves_the_arena_alone() {
    let mut faulty = Faulty::open_on(Mount::MayHang, 64, |_| {});
    let own = keys(0..4);
    faulty.harness.store_all(&own);
    faulty.hold_reads();
    faulty.harness.begin_load_at(&own, &[0, 1, 2, 3]);
    faulty.harness.begin_load_at(&own, &[4, 5, 6, 7]);
    faulty.wait_held(1);
    faulty
        .harness
        .tier
        .close(Duration::from_millis(100))
        .unwrap();
    assert!(faulty.harness.arena.copy_in(0, &vec![7; 8 * ROW_BYTES]));
    faulty.engine.release();
    std::thread::sleep(Duration::from_millis(100));
    assert!(all_sevens(&faulty, 0, 8));
}

#[test]
fn local_disks_and_callers_that_honour_busy_slots_read_to_the_slots_themselves() {
    for (mount, honours_busy) in [(Mount::Local, false), (Mount::MayHang, true)] {
        let mut faulty = Faulty::open_on(mount, 64, |own| own.honours_busy = honours_busy);
        let own = [key(1, 0)];
        faulty.harness.store_all(&own);
        faulty.harness.wipe();
        faulty.hold_reads();
        let job = faulty.harness.begin_load_at(&own, &[0]);
        faulty.wait_held(1);
        assert_eq!(faulty.harness.stat("load_buffer_bytes"), 0);
        assert!(
            faulty.harness.holds(0, &own[0]),
            "the kernel was told to read elsewhere"
        );
        faulty.engine.release();
        assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Ok]);
    }
    let mut faulty = Faulty::open_on(Mount::MayHang, 64, |_| {});
    let own = [key(1, 0)];
    faulty.harness.store_all(&own);
    faulty.harness.wipe();
    faulty.fail(Direction::Read, Fault::Hold);
    let job = faulty.harness.begin_load_at(&own, &[0]);
    faulty.wait_held(1);
    assert_eq!(faulty.harness.stat("load_buffer_bytes"), 8192);
    assert!(!faulty.harness.holds(0, &own[0]));
    faulty.engine.release();
    assert_eq!(faulty.harness.result(job).outcomes, [Outcome::Ok]);
    assert!(faulty.harness.holds(0, &own[0]));
}
