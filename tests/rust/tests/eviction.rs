//! The eviction policy's contract, and LRU's order.

use std::time::{Duration, Instant};

use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};

const CLASS: Class = Class(0);

fn place(container: u32) -> Placement {
    Placement {
        class: CLASS,
        container: ContainerId(container),
    }
}

fn unprotected(_: EntryId) -> bool {
    false
}

fn lru_with(entries: u32) -> Box<dyn EvictionPolicy> {
    let mut policy = create("lru").unwrap();
    for entry in 0..entries {
        policy.insert(EntryId(entry), place(0));
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
        rows.iter().for_each(|row| policy.pin(*row));
        for row in completion_order {
            policy.unpin(EntryId(row));
        }
        assert_eq!(evict(&mut *policy, 3), Some(vec![7, 6, 5]));
    }
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
    let start = Instant::now();
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
    let start = Instant::now();
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
        policy.insert(EntryId(entry), place(entry / 2));
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
    policy.insert(EntryId(2), other);
    let mut victims = Vec::new();
    assert!(!policy.evict(2, Class(3), &unprotected, &mut victims));
    assert!(policy.evict(1, Class(3), &unprotected, &mut victims));
    assert_eq!(victims, [EntryId(2)]);
    assert!(policy.evict(0, Class(3), &unprotected, &mut victims));
    assert_eq!(policy.evictable(CLASS), 2);
}
