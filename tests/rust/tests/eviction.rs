//! The eviction policy's contract, and LRU's order.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use kvstrata_core::eviction::request::Tag;
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};
use kvstrata_core::sys::clock::{Clock, SystemClock};

const CLASS: Class = Class(0);

fn place(container: u32) -> Placement {
    Placement {
        class: CLASS,
        container: ContainerId(container),
    }
}

fn tag(entry: u32) -> Tag {
    Tag(u64::from(entry).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn unprotected(_: EntryId) -> bool {
    false
}

fn lru_with(entries: u32) -> Box<dyn EvictionPolicy> {
    let mut policy = create("lru").unwrap();
    for entry in 0..entries {
        policy.insert(EntryId(entry), tag(entry), place(0));
    }
    policy
}

fn evict(policy: &mut dyn EvictionPolicy, need: usize) -> Option<Vec<u32>> {
    let mut victims = Vec::new();
    let done = policy.evict(need, CLASS, &unprotected, &mut victims);
    assert_eq!(done, victims.len() == need, "all or nothing");
    done.then(|| victims.into_iter().map(|entry| entry.0).collect())
}

#[test]
fn the_tail_of_a_request_goes_first_whatever_order_its_loads_complete_in() {
    let completions: [Vec<u32>; 3] = [
        (0..8).collect(),
        (0..8).rev().collect(),
        vec![3, 7, 0, 5, 6, 1, 2, 4],
    ];
    for completion_order in completions {
        let mut policy = lru_with(8);
        let rows: Vec<EntryId> = (0..8).map(EntryId).collect();
        policy.access_request(&rows);
        for row in &rows {
            policy.pin(*row);
        }
        for row in completion_order {
            policy.unpin(EntryId(row));
        }
        assert_eq!(evict(&mut *policy, 3), Some(vec![7, 6, 5]));
    }
}

#[test]
fn a_policy_that_is_filled_is_as_one_whose_entries_were_inserted_one_by_one() {
    let placement = |entry: u32| Placement {
        class: Class(u16::try_from(entry % 2).unwrap()),
        container: ContainerId(entry % 6),
    };
    let coldest_first = (0..1000_u32).map(|at| at * 7 % 1000);
    for class in [Class(0), Class(1)] {
        let mut inserted = create("lru").unwrap();
        for entry in coldest_first.clone() {
            inserted.insert(EntryId(entry), tag(entry), placement(entry));
        }
        let mut filled = create("lru").unwrap();
        filled.fill(
            &mut (0..1000).map(|entry| (EntryId(entry), tag(entry), placement(entry))),
            &mut coldest_first.clone().map(EntryId),
        );
        let policies = [&mut inserted, &mut filled];
        let told = policies.map(|policy| {
            let before = (policy.len(), policy.evictable(class), policy.coldest(class));
            let container = policy.coldest_container(class);
            let mut victims = Vec::new();
            policy.pin(EntryId(2));
            policy.pin(EntryId(3));
            assert!(policy.evict(300, class, &unprotected, &mut victims));
            policy.unpin(EntryId(2));
            policy.unpin(EntryId(3));
            assert!(policy.evict(200, class, &unprotected, &mut victims));
            assert!(!policy.evict(1, class, &unprotected, &mut victims));
            (before, container, victims, policy.coldest_container(class))
        });
        let [one, other] = told;
        assert_eq!(one, other);
        assert_eq!(one.2.len(), 500);
    }
}

#[test]
fn a_row_with_more_pins_than_are_counted_is_never_given_away() {
    let mut policy = lru_with(2);
    for _ in 0..70_000 {
        policy.pin(EntryId(0));
    }
    for _ in 0..70_000 {
        policy.unpin(EntryId(0));
    }
    assert_eq!(policy.evictable(CLASS), 1);
    assert_eq!(evict(&mut *policy, 2), None);
    assert_eq!(evict(&mut *policy, 1), Some(vec![1]));
}

#[test]
fn five_hundred_touches_of_one_request_count_as_one_access() {
    let mut policy = lru_with(10);
    let rows: Vec<EntryId> = (0..8).map(EntryId).collect();
    for _ in 0..500 {
        policy.access_request(&rows);
    }
    assert_eq!(evict(&mut *policy, 5), Some(vec![8, 9, 7, 6, 5]));
}

#[test]
fn ten_thousand_failing_stores_on_a_million_pinned_rows_take_less_than_50_ms() {
    let mut policy = lru_with(1_000_000);
    (0..1_000_000).for_each(|entry| policy.pin(EntryId(entry)));
    let start = SystemClock.now();
    for _ in 0..10_000 {
        assert_eq!(evict(&mut *policy, 1), None);
    }
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_millis(50), "{elapsed:?}");
}

#[test]
fn pinned_rows_at_the_cold_end_are_walked_over_only_once() {
    let mut policy = lru_with(1_010_000);
    (0..1_000_000).for_each(|entry| policy.pin(EntryId(entry)));
    assert_eq!(evict(&mut *policy, 1), Some(vec![1_000_000]));
    let start = SystemClock.now();
    for expected in 1_000_001..1_009_000 {
        assert_eq!(evict(&mut *policy, 1), Some(vec![expected]));
    }
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
    policy.unpin(EntryId(5));
    policy.unpin(EntryId(3));
    assert_eq!(policy.coldest(CLASS), Some(4));
    assert_eq!(evict(&mut *policy, 3), Some(vec![3, 5, 1_009_000]));
}

#[test]
fn an_eviction_that_cannot_be_whole_changes_nothing() {
    let mut policy = lru_with(6);
    policy.pin(EntryId(0));
    let mut victims = Vec::new();
    let protected = |entry: EntryId| entry.0 < 3;
    assert!(!policy.evict(4, CLASS, &protected, &mut victims));
    assert!(victims.is_empty());
    assert_eq!((policy.len(), policy.evictable(CLASS)), (6, 5));
    assert!(policy.evict(3, CLASS, &protected, &mut victims));
    assert_eq!(victims, [EntryId(3), EntryId(4), EntryId(5)]);
    policy.unpin(EntryId(0));
    assert_eq!(evict(&mut *policy, 3), Some(vec![0, 1, 2]));
    assert!(policy.is_empty());
}

#[test]
fn a_row_pinned_twice_is_evictable_only_after_two_unpins() {
    let mut policy = lru_with(1);
    policy.pin(EntryId(0));
    policy.pin(EntryId(0));
    policy.unpin(EntryId(0));
    assert_eq!(evict(&mut *policy, 1), None);
    policy.unpin(EntryId(0));
    assert_eq!(evict(&mut *policy, 1), Some(vec![0]));
}

#[test]
fn unknown_handles_and_unpins_without_a_pin_are_ignored() {
    let mut policy = lru_with(2);
    policy.access(EntryId(9));
    policy.pin(EntryId(u32::MAX));
    policy.unpin(EntryId(9));
    policy.unpin(EntryId(0));
    policy.remove(EntryId(7));
    assert_eq!((policy.len(), policy.evictable(CLASS)), (2, 2));
    assert_eq!(evict(&mut *policy, 2), Some(vec![0, 1]));
}

#[test]
fn the_container_offered_is_the_coldest_one_without_pinned_rows() {
    let mut policy = create("lru").unwrap();
    for entry in 0..6 {
        policy.insert(EntryId(entry), tag(entry), place(entry / 2));
    }
    policy.access(EntryId(0));
    assert_eq!(policy.coldest_container(CLASS), Some((ContainerId(1), 4)));
    policy.pin(EntryId(2));
    assert_eq!(policy.coldest_container(CLASS), Some((ContainerId(2), 6)));
    let mut victims = Vec::new();
    assert!(!policy.remove_container(ContainerId(1), &mut victims));
    assert!(policy.remove_container(ContainerId(2), &mut victims));
    assert_eq!(victims, [EntryId(4), EntryId(5)]);
    assert_eq!(policy.coldest_container(CLASS), Some((ContainerId(0), 7)));
}

#[test]
fn classes_give_up_only_their_own_rows() {
    let mut policy = lru_with(2);
    let other = Placement {
        class: Class(3),
        container: ContainerId(9),
    };
    policy.insert(EntryId(2), tag(2), other);
    let mut victims = Vec::new();
    assert!(!policy.evict(2, Class(3), &unprotected, &mut victims));
    assert!(policy.evict(1, Class(3), &unprotected, &mut victims));
    assert_eq!(victims, [EntryId(2)]);
    assert!(policy.evict(0, Class(3), &unprotected, &mut victims));
    assert_eq!(policy.evictable(CLASS), 2);
}

/// Entries in the order in which `lru` is to evict them, as a plain list.
struct Plain(Vec<u32>);

impl Plain {
    fn put(&mut self, entry: u32, warmer: Option<u32>) {
        self.0.retain(|other| *other != entry);
        let place = |warmer| self.0.iter().position(|other| *other == warmer);
        let at = warmer.and_then(place).unwrap_or(self.0.len());
        self.0.insert(at, entry);
    }
}

#[test]
fn rows_that_a_request_adds_to_its_earlier_ones_go_before_them_and_after_all_that_is_older() {
    let mut policy = create("lru").unwrap();
    let mut plain = Plain(Vec::new());
    let mut random = 1_u64;
    let mut draw = |below: u32| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        u32::try_from((random >> 33) % u64::from(below)).unwrap()
    };
    for _ in 0..20_000 {
        let entry = draw(400);
        match draw(4) {
            0 => {
                policy.insert(EntryId(entry), tag(entry), place(0));
                plain.put(entry, None);
            }
            1 => {
                let head_first: Vec<u32> = (1..draw(60)).map(|more| (entry + more) % 400).collect();
                let row = |one: &u32| (EntryId(*one), tag(*one), place(0));
                let rows: Vec<_> = head_first.iter().map(row).collect();
                policy.insert_behind(&rows, EntryId(entry));
                let mut warmer = entry;
                for one in head_first {
                    plain.put(one, Some(warmer));
                    warmer = one;
                }
            }
            2 => {
                policy.access(EntryId(entry));
                if plain.0.contains(&entry) {
                    plain.put(entry, None);
                }
            }
            _ => {
                let need = usize::try_from(draw(60)).unwrap().min(plain.0.len());
                let expected: Vec<u32> = plain.0.drain(..need).collect();
                assert_eq!(evict(&mut *policy, need), Some(expected));
            }
        }
        assert_eq!(policy.len(), plain.0.len());
    }
}
