//! The CPU tier: what is found, what may go, and what a slot is kept for.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvstrata_core::cpu::{CpuOptions, CpuTier, Handle, Presence, User};
use kvstrata_core::key::{GroupId, Key};
use serde_json::Value;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn key(number: u64, group: u32) -> Key {
    let mut bytes = [0_u8; 36];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    bytes[32..].copy_from_slice(&group.to_be_bytes());
    Key::new(&bytes).unwrap()
}

fn keys(numbers: impl IntoIterator<Item = u64>, group: u32) -> Vec<Key> {
    numbers
        .into_iter()
        .map(|number| key(number, group))
        .collect()
}

fn tier(arena_bytes: u64, sizes: &[u64]) -> CpuTier {
    CpuTier::new(CpuOptions {
        arena_bytes,
        align: 64,
        row_bytes: (0..).map(GroupId).zip(sizes.iter().copied()).collect(),
        policy: "lru".to_owned(),
        ..CpuOptions::default()
    })
    .unwrap()
}

/// Stores keys and completes them; the keys that went for it.
fn store(tier: &mut CpuTier, keys: &[Key]) -> Option<Vec<Key>> {
    let prepared = tier.prepare_store(keys, User::Worker).unwrap()?;
    tier.complete_store(keys, true);
    Some(prepared.evicted)
}

fn ready(tier: &mut CpuTier, keys: &[Key]) -> usize {
    let found = tier.lookup(keys);
    found.iter().filter(|one| **one == Presence::Ready).count()
}

fn number(tier: &CpuTier, field: &str) -> u64 {
    tier.stats().get(field).and_then(Value::as_u64).unwrap()
}

#[test]
fn a_row_is_found_from_its_preparation_and_loadable_from_its_completion() {
    let mut tier = tier(4 * KIB, &[KIB]);
    let wanted = keys(0..2, 0);
    assert_eq!(tier.lookup(&wanted), [Presence::Absent; 2]);
    let prepared = tier.prepare_store(&wanted, User::Worker).unwrap().unwrap();
    assert_eq!(prepared.positions, [0, 1]);
    assert_eq!(tier.lookup(&wanted), [Presence::Writing; 2]);
    assert_eq!(tier.prepare_load(&wanted), None);
    assert_eq!(tier.complete_store(&wanted, true), [0, 1]);
    assert_eq!(tier.lookup(&wanted), [Presence::Ready; 2]);
    let offsets: Vec<u64> = prepared.places.iter().map(|place| place.offset).collect();
    let loaded = tier.prepare_load(&wanted).unwrap();
    let again: Vec<u64> = loaded.iter().map(|place| place.offset).collect();
    assert_eq!(again, offsets);
}

#[test]
fn keys_that_are_there_are_left_out_and_the_others_keep_their_order() {
    let mut tier = tier(8 * KIB, &[KIB]);
    store(&mut tier, &keys([2, 5], 0)).unwrap();
    let wanted = keys([1, 2, 3, 3, 5, 4], 0);
    let prepared = tier.prepare_store(&wanted, User::Worker).unwrap().unwrap();
    assert_eq!(prepared.positions, [0, 2, 5]);
    assert!(prepared.evicted.is_empty());
}

#[test]
fn a_store_that_does_not_fit_changes_nothing() {
    let mut tier = tier(4 * KIB, &[KIB]);
    store(&mut tier, &keys(0..3, 0)).unwrap();
    tier.prepare_load(&keys(0..2, 0)).unwrap();
    let before = tier.stats();
    assert_eq!(
        tier.prepare_store(&keys(10..13, 0), User::Worker).unwrap(),
        None
    );
    assert_eq!(ready(&mut tier, &keys(0..3, 0)), 3);
    assert_eq!(before.get("rows"), tier.stats().get("rows"));
    assert_eq!(number(&tier, "refused_stores"), 1);
    assert_eq!(store(&mut tier, &keys(10..12, 0)), Some(keys([2], 0)));
}

#[test]
fn keys_of_the_same_store_that_are_there_do_not_make_room_for_the_others() {
    let mut tier = tier(2 * KIB, &[KIB]);
    store(&mut tier, &keys([0, 1], 0)).unwrap();
    assert_eq!(store(&mut tier, &keys([0, 7], 0)), Some(keys([1], 0)));
    assert_eq!(store(&mut tier, &keys([0, 7, 8], 0)), None);
}

#[test]
fn the_tail_of_a_request_goes_before_its_head() {
    let mut tier = tier(4 * KIB, &[KIB]);
    store(&mut tier, &keys(0..4, 0)).unwrap();
    assert_eq!(store(&mut tier, &keys([9], 0)), Some(keys([3], 0)));
    assert_eq!(store(&mut tier, &keys([8], 0)), Some(keys([2], 0)));
}

#[test]
fn of_groups_that_share_slots_the_tails_go_together() {
    let mut tier = tier(6 * KIB, &[KIB, KIB]);
    let both = [keys(0..3, 0), keys(0..3, 1)].concat();
    store(&mut tier, &both).unwrap();
    let mut gone = store(&mut tier, &keys([8, 9], 0)).unwrap();
    gone.sort_unstable_by_key(|key| *key.as_bytes().last().unwrap());
    assert_eq!(gone, [key(2, 0), key(2, 1)]);
}

#[test]
fn a_load_counts_as_an_access() {
    let mut tier = tier(3 * KIB, &[KIB]);
    store(&mut tier, &keys([0], 0)).unwrap();
    store(&mut tier, &keys([1, 2], 0)).unwrap();
    tier.prepare_load(&keys([0], 0)).unwrap();
    tier.complete_load(&keys([0], 0));
    assert_eq!(store(&mut tier, &keys([3], 0)), Some(keys([2], 0)));
}

#[test]
fn a_row_in_use_stays_until_its_last_user_is_done() {
    let mut tier = tier(KIB, &[KIB]);
    store(&mut tier, &keys([0], 0)).unwrap();
    tier.prepare_load(&keys([0], 0)).unwrap();
    tier.prepare_load(&keys([0], 0)).unwrap();
    let held = tier.hold_ready(&keys([0, 1], 0));
    assert_eq!(held[1], None);
    tier.complete_load(&keys([0], 0));
    assert_eq!(store(&mut tier, &keys([1], 0)), None);
    tier.complete_load(&keys([0], 0));
    assert_eq!(store(&mut tier, &keys([1], 0)), None);
    tier.let_go(&[held[0].unwrap().handle], true);
    assert_eq!(store(&mut tier, &keys([1], 0)), Some(keys([0], 0)));
}

#[test]
fn more_ends_than_begins_free_nothing_that_is_in_use() {
    let mut tier = tier(KIB, &[KIB]);
    store(&mut tier, &keys([0], 0)).unwrap();
    let handle = tier.hold_ready(&keys([0], 0))[0].unwrap().handle;
    tier.complete_load(&keys([0], 0));
    tier.complete_load(&keys([0], 0));
    assert_eq!(store(&mut tier, &keys([1], 0)), None);
    tier.let_go(&[handle, handle, Handle(77)], true);
    assert_eq!(store(&mut tier, &keys([1], 0)), Some(keys([0], 0)));
    tier.let_go(&[handle], false);
    assert_eq!(ready(&mut tier, &keys([1], 0)), 1);
}

#[test]
fn a_store_that_failed_leaves_no_row_and_gives_its_slot_back() {
    let mut tier = tier(KIB, &[KIB]);
    tier.prepare_store(&keys([0], 0), User::Worker)
        .unwrap()
        .unwrap();
    assert_eq!(tier.complete_store(&keys([0], 0), false), [0_usize; 0]);
    assert_eq!(tier.lookup(&keys([0], 0)), [Presence::Absent]);
    assert_eq!(store(&mut tier, &keys([1], 0)), Some(Vec::new()));
}

#[test]
fn a_load_from_below_makes_its_row_ready_or_leaves_none() {
    let mut tier = tier(2 * KIB, &[KIB]);
    let prepared = tier
        .prepare_store(&keys([0, 1], 0), User::Tier)
        .unwrap()
        .unwrap();
    // No worker writes these.
    assert!(tier.complete_store(&keys([0, 1], 0), true).is_empty());
    tier.let_go(&[prepared.places[0].handle], true);
    tier.let_go(&[prepared.places[1].handle], false);
    assert_eq!(
        tier.lookup(&keys([0, 1], 0)),
        [Presence::Ready, Presence::Absent]
    );
}

#[test]
fn an_abandoned_row_is_absent_at_once_and_its_slot_is_busy_until_it_is_let_go() {
    let mut tier = tier(2 * KIB, &[KIB]);
    let prepared = tier
        .prepare_store(&keys([0], 0), User::Tier)
        .unwrap()
        .unwrap();
    let old = prepared.places[0];
    tier.abandon(&[old.handle]);
    assert_eq!(tier.lookup(&keys([0], 0)), [Presence::Absent]);
    let again = tier
        .prepare_store(&keys([0], 0), User::Worker)
        .unwrap()
        .unwrap();
    assert_ne!(again.places[0].offset, old.offset);
    assert_eq!(
        tier.prepare_store(&keys([1], 0), User::Worker).unwrap(),
        None
    );
    tier.let_go(&[old.handle], true);
    assert_eq!(tier.lookup(&keys([0], 0)), [Presence::Writing]);
    assert!(
        tier.prepare_store(&keys([1], 0), User::Worker)
            .unwrap()
            .is_some()
    );
}

#[test]
fn a_row_is_forgotten_only_when_nobody_uses_it() {
    let mut tier = tier(3 * KIB, &[KIB]);
    store(&mut tier, &keys([0, 1], 0)).unwrap();
    tier.prepare_load(&keys([1], 0)).unwrap();
    tier.prepare_store(&keys([2], 0), User::Worker)
        .unwrap()
        .unwrap();
    tier.forget(&keys(0..4, 0));
    assert_eq!(
        tier.lookup(&keys(0..3, 0)),
        [Presence::Absent, Presence::Ready, Presence::Writing]
    );
    assert_eq!(store(&mut tier, &keys([3], 0)), Some(Vec::new()));
}

#[test]
fn a_reset_hides_everything_and_keeps_slots_in_use() {
    let mut tier = tier(4 * KIB, &[KIB]);
    store(&mut tier, &keys(0..3, 0)).unwrap();
    tier.prepare_load(&keys([0], 0)).unwrap();
    let held = tier.hold_ready(&keys([1], 0))[0].unwrap();
    tier.prepare_store(&keys([3], 0), User::Worker)
        .unwrap()
        .unwrap();
    tier.reset();
    tier.reset();
    assert_eq!(tier.lookup(&keys(0..4, 0)), [Presence::Absent; 4]);
    assert_eq!(number(&tier, "orphaned_rows"), 3);
    // One slot is free: that of the row nobody used.
    assert_eq!(
        tier.prepare_store(&keys(10..12, 0), User::Worker).unwrap(),
        None
    );
    // Of jobs from before the reset nothing may be taken for one of now.
    tier.complete_store(&keys([3], 0), true);
    tier.complete_load(&keys([0], 0));
    assert_eq!(number(&tier, "orphaned_rows"), 3);
    tier.flushed();
    assert_eq!(number(&tier, "orphaned_rows"), 1);
    assert_eq!(store(&mut tier, &keys(10..13, 0)), Some(Vec::new()));
    tier.let_go(&[held.handle], true);
    assert_eq!(number(&tier, "orphaned_rows"), 0);
    assert_eq!(store(&mut tier, &keys([13], 0)), Some(Vec::new()));
}

#[test]
fn a_flush_leaves_what_began_after_the_reset() {
    let mut tier = tier(2 * KIB, &[KIB]);
    tier.prepare_store(&keys([0], 0), User::Worker)
        .unwrap()
        .unwrap();
    tier.reset();
    tier.prepare_store(&keys([0], 0), User::Worker)
        .unwrap()
        .unwrap();
    tier.flushed();
    assert_eq!(tier.lookup(&keys([0], 0)), [Presence::Writing]);
    assert_eq!(tier.complete_store(&keys([0], 0), true), [0]);
}

#[test]
fn a_key_of_a_group_without_a_size_is_refused_and_takes_nothing() {
    let mut tier = tier(2 * KIB, &[KIB]);
    let error = tier
        .prepare_store(&[key(0, 0), key(0, 7)], User::Worker)
        .unwrap_err();
    assert_eq!(error.to_string(), "a key of group 7, which has no row size");
    assert_eq!(tier.lookup(&[key(0, 0)]), [Presence::Absent]);
}

#[test]
fn sixteen_keys_of_eight_equal_groups_fit_where_sixteen_rows_do() {
    let mut tier = tier(16 * MIB, &[MIB; 8]);
    for chunk in 0..2 {
        for group in 0..8 {
            assert_eq!(store(&mut tier, &[key(chunk, group)]), Some(Vec::new()));
        }
    }
    assert_eq!(number(&tier, "rows"), 16);
    assert_eq!(number(&tier, "payload_bytes"), 16 * MIB);
}

#[test]
fn groups_of_unequal_rows_fill_the_arena_with_payload() {
    let sizes = [MIB, MIB, MIB, MIB, MIB, MIB, MIB, 64 * KIB];
    let mut tier = tier(710 * MIB, &sizes);
    let mut chunk = 0;
    loop {
        let all: Vec<Key> = (0..8).map(|group| key(chunk, group)).collect();
        let evicted = store(&mut tier, &all).unwrap();
        if !evicted.is_empty() {
            break;
        }
        chunk += 1;
    }
    assert_eq!(chunk, 100);
    let payload = number(&tier, "payload_bytes");
    assert!(payload * 100 >= 710 * MIB * 98, "{payload}");
}

/// An arena full of group 1, then twice `part` of its bytes of group 2.
fn resident_after(part_percent: u64, sizes: [u64; 2], arena: u64) -> (u64, u64) {
    let mut tier = tier(arena, &sizes);
    let mut chunk = 0;
    while store(&mut tier, &[key(chunk, 0)]).unwrap().is_empty() {
        chunk += 1;
    }
    let asked = arena / 100 * part_percent;
    let rows = (2 * asked).div_ceil(sizes[1]);
    for number in 0..rows {
        store(&mut tier, &[key(number, 1)]).unwrap();
    }
    let resident = u64::try_from(ready(&mut tier, &keys(0..rows, 1))).unwrap();
    (resident * sizes[1], asked)
}

#[test]
fn a_group_that_is_stored_takes_the_space_of_one_that_is_not_used() {
    for sizes in [
        [10 * KIB, 4 * KIB],
        [4 * KIB, 10 * KIB],
        [64 * KIB, 4 * KIB],
        [3 * KIB, 5 * KIB],
    ] {
        for part in [1, 10, 25, 50] {
            let (resident, asked) = resident_after(part, sizes, 4 * MIB);
            assert!(
                resident >= asked,
                "{sizes:?}, {part} %: {resident} of {asked}"
            );
        }
    }
}

#[test]
fn a_slab_of_older_rows_goes_before_a_row_of_the_own_size() {
    let mut tier = tier(20 * KIB, &[10 * KIB, 5 * KIB]);
    store(&mut tier, &keys([0], 0)).unwrap();
    store(&mut tier, &keys([0, 1], 1)).unwrap();
    assert_eq!(store(&mut tier, &keys([2], 1)), Some(keys([0], 0)));
    assert_eq!(number(&tier, "moved_slabs"), 1);
}

#[test]
fn a_slab_of_younger_rows_stays_and_a_row_of_the_own_size_goes() {
    let mut tier = tier(20 * KIB, &[10 * KIB, 5 * KIB]);
    store(&mut tier, &keys([0, 1], 1)).unwrap();
    store(&mut tier, &keys([0], 0)).unwrap();
    assert_eq!(store(&mut tier, &keys([2], 1)), Some(keys([1], 1)));
    assert_eq!(number(&tier, "moved_slabs"), 0);
}

#[test]
fn a_slab_with_a_row_in_use_does_not_move() {
    let mut tier = tier(10 * KIB, &[5 * KIB, 10 * KIB]);
    store(&mut tier, &keys([0, 1], 0)).unwrap();
    tier.prepare_load(&keys([1], 0)).unwrap();
    assert_eq!(store(&mut tier, &keys([0], 1)), None);
    assert_eq!(ready(&mut tier, &keys([0, 1], 0)), 2);
    tier.complete_load(&keys([1], 0));
    assert_eq!(store(&mut tier, &keys([0], 1)).unwrap().len(), 2);
}

#[test]
fn a_slab_with_a_row_from_before_a_reset_does_not_move() {
    let mut tier = tier(10 * KIB, &[5 * KIB, 10 * KIB]);
    tier.prepare_store(&keys([0], 0), User::Worker)
        .unwrap()
        .unwrap();
    tier.reset();
    store(&mut tier, &keys([1], 0)).unwrap();
    assert_eq!(store(&mut tier, &keys([0], 1)), None);
    assert_eq!(ready(&mut tier, &keys([1], 0)), 1);
    tier.flushed();
    assert_eq!(store(&mut tier, &keys([0], 1)), Some(keys([1], 0)));
}
