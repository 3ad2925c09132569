//! Requests that the CPU tier is told of: one access each, rows in the order of the prompt, and rows
//! that stay while their request waits.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvstrata_core::cpu::{Asker, CpuOptions, CpuTier, Presence, User};
use kvstrata_core::eviction::admission::AdmissionOptions;
use kvstrata_core::eviction::request::Context;
use kvstrata_core::key::{GroupId, Key};
use serde_json::Value;

const ROW: u64 = 1024;
const TOKENS: u64 = 16;

fn key(number: u64, group: u32) -> Key {
    let mut bytes = [0_u8; 36];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    bytes[32..].copy_from_slice(&group.to_be_bytes());
    Key::new(&bytes).unwrap()
}

fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<Key> {
    numbers.into_iter().map(|number| key(number, 0)).collect()
}

struct Requests {
    tier: CpuTier,
}

impl Requests {
    fn new(slots: u64, policy: &str) -> Self {
        let tier = CpuTier::new(CpuOptions {
            arena_bytes: slots * ROW,
            row_bytes: vec![(GroupId(0), ROW)],
            policy: policy.to_owned(),
            ..CpuOptions::default()
        });
        Self {
            tier: tier.unwrap(),
        }
    }

    fn lru(slots: u64) -> Self {
        Self::new(slots, "lru")
    }

    /// Stores chunks of a request, the first of which has number `at`; the keys that went for it.
    fn store(&mut self, request: u32, at: u64, chunks: &[Key]) -> Option<Vec<Key>> {
        let first = at + 1;
        let ends: Vec<Option<u64>> = (first..)
            .map(|chunk| Some(chunk * TOKENS))
            .take(chunks.len())
            .collect();
        let asker = Asker {
            request,
            ends: &ends,
        };
        let prepared = self.tier.prepare_store_for(asker, chunks, User::Worker);
        let evicted = prepared.unwrap()?.evicted;
        self.tier.complete_store(chunks, true);
        Some(evicted)
    }

    fn load(&mut self, request: u32, chunks: &[Key]) {
        let ends: Vec<Option<u64>> = (1..)
            .map(|chunk| Some(chunk * TOKENS))
            .take(chunks.len())
            .collect();
        let asker = Asker {
            request,
            ends: &ends,
        };
        assert!(self.tier.prepare_load_for(asker, chunks).is_some());
        self.tier.complete_load(chunks);
    }

    fn observe(&mut self, request: u32, chunks: &[Key]) {
        let ends = (1..).map(|chunk| chunk * TOKENS);
        let named: Vec<(Key, u64)> = chunks.iter().copied().zip(ends).collect();
        self.tier.observe(request, &named, Context::default());
    }

    /// The keys that go when so many others come, one after the other.
    fn victims(&mut self, count: u64) -> Vec<Key> {
        let mut gone = Vec::new();
        for number in 0..count {
            gone.extend(self.store(0, 0, &keys([1_000_000 + number])).unwrap());
        }
        gone
    }

    fn number(&self, field: &str) -> u64 {
        let stats = self.tier.stats();
        stats.get(field).and_then(Value::as_u64).unwrap()
    }
}

#[test]
fn rows_of_several_stores_of_a_request_go_from_its_tail() {
    let mut requests = Requests::lru(6);
    for chunk in 0..6 {
        requests.store(7, chunk, &keys([chunk])).unwrap();
    }
    assert_eq!(requests.victims(4), keys([5, 4, 3, 2]));
}

#[test]
fn a_row_that_is_stored_late_stands_where_its_chunk_is() {
    let mut requests = Requests::lru(4);
    requests.store(7, 0, &keys([0])).unwrap();
    requests.store(7, 3, &keys([3])).unwrap();
    requests.store(7, 1, &keys([1, 2])).unwrap();
    assert_eq!(requests.victims(4), keys([3, 2, 1, 0]));
}

#[test]
fn rows_that_a_request_adds_are_no_warmer_than_its_others() {
    let mut requests = Requests::lru(4);
    requests.store(7, 0, &keys([0])).unwrap();
    requests.store(8, 0, &keys([10, 11])).unwrap();
    requests.store(7, 1, &keys([1])).unwrap();
    assert_eq!(requests.victims(4), keys([1, 0, 11, 10]));
}

#[test]
fn rows_stored_again_after_a_failure_keep_their_order() {
    let mut requests = Requests::lru(3);
    let first = keys([0]);
    let ends = [Some(TOKENS)];
    let asker = Asker {
        request: 7,
        ends: &ends,
    };
    let tier = &mut requests.tier;
    assert!(
        tier.prepare_store_for(asker, &first, User::Worker)
            .unwrap()
            .is_some()
    );
    tier.complete_store(&first, false);
    for chunk in 0..3 {
        requests.store(7, chunk, &keys([chunk])).unwrap();
    }
    assert_eq!(requests.victims(3), keys([2, 1, 0]));
}

#[test]
fn a_row_added_while_the_one_before_it_is_pinned_and_out_of_the_list_is_found() {
    let mut requests = Requests::lru(3);
    requests.store(7, 0, &keys([0])).unwrap();
    requests.store(8, 0, &keys([10])).unwrap();
    let held = requests.tier.hold_ready(&keys([0]));
    // This store passes the pinned row at the cold end.
    requests.store(9, 0, &keys([20, 21])).unwrap();
    requests.store(7, 1, &keys([1])).unwrap();
    let handles: Vec<_> = held.iter().flatten().map(|place| place.handle).collect();
    requests.tier.let_go(&handles, true);
    let mut gone = requests.victims(3);
    gone.sort_unstable_by_key(|key| key.as_bytes()[7]);
    assert_eq!(gone, keys([0, 1, 20]));
}

#[test]
fn of_groups_that_share_slots_the_tails_go_together_whichever_store_brought_them() {
    let row_bytes = vec![(GroupId(0), ROW), (GroupId(1), ROW)];
    let tier = CpuTier::new(CpuOptions {
        arena_bytes: 8 * ROW,
        row_bytes,
        ..CpuOptions::default()
    });
    let mut requests = Requests {
        tier: tier.unwrap(),
    };
    for chunk in 0..3 {
        let both = [key(chunk, 0), key(chunk, 1)];
        let ends = [Some((chunk + 1) * TOKENS); 2];
        let asker = Asker {
            request: 7,
            ends: &ends,
        };
        let stored = requests.tier.prepare_store_for(asker, &both, User::Worker);
        assert!(stored.unwrap().is_some());
        requests.tier.complete_store(&both, true);
    }
    let gone = requests.store(8, 0, &keys(10..14)).unwrap();
    let chunks: Vec<u8> = gone.iter().map(|key| key.as_bytes()[7]).collect();
    assert_eq!(chunks, [2, 2]);
}

#[test]
fn an_arrival_is_the_one_access_of_its_request() {
    let mut requests = Requests::lru(4);
    requests.store(1, 0, &keys([0, 1])).unwrap();
    requests.store(2, 0, &keys([10, 11])).unwrap();
    requests.tier.finish(1, None);
    requests.tier.finish(2, None);
    requests.observe(3, &keys([0, 1]));
    requests.observe(4, &keys([10, 11]));
    requests.load(3, &keys([0, 1]));
    requests.tier.runs(4);
    assert_eq!(requests.victims(4), keys([1, 0, 11, 10]));
}

#[test]
fn rows_that_come_from_below_while_a_request_waits_take_their_place_in_it() {
    let mut requests = Requests::lru(4);
    requests.store(1, 0, &keys([0])).unwrap();
    requests.tier.finish(1, None);
    requests.observe(3, &keys([0, 1, 2]));
    // Two waves of loads from below, by nobody.
    requests.store(0, 0, &keys([1])).unwrap();
    requests.store(0, 0, &keys([2])).unwrap();
    requests.load(3, &keys([0, 1, 2]));
    requests.tier.runs(3);
    assert_eq!(requests.victims(4), keys([2, 1, 0]));
}

#[test]
fn the_end_of_a_request_renews_its_rows_from_the_tail() {
    let mut requests = Requests::lru(5);
    requests.observe(3, &keys([0, 1, 2]));
    requests.store(3, 0, &keys([0, 1])).unwrap();
    requests.store(4, 0, &keys([10, 11])).unwrap();
    requests.store(3, 2, &keys([2])).unwrap();
    requests.tier.finish(3, Some(5));
    assert_eq!(requests.victims(5), keys([11, 10, 2, 1, 0]));
}

#[test]
fn the_rows_of_a_waiting_request_stay_until_it_runs() {
    for policy in ["lru", "th", "arc_vllm", "s3fifo"] {
        let mut requests = Requests::new(8, policy);
        requests.store(1, 0, &keys([0, 1])).unwrap();
        requests.store(1, 2, &keys([2, 3, 4, 5])).unwrap();
        requests.tier.finish(1, None);
        requests.observe(3, &keys([0, 1]));
        requests.tier.waits(3);
        assert_eq!(requests.tier.awaited(), (1, 2 * ROW), "{policy}");
        for _ in 0..3 {
            requests.victims(20);
            let found = requests.tier.lookup(&keys([0, 1]));
            assert_eq!(found, [Presence::Ready; 2], "{policy}");
        }
        requests.tier.runs(3);
        assert_eq!(requests.tier.awaited(), (0, 0), "{policy}");
        requests.store(0, 0, &keys(50..58)).unwrap();
        let found = requests.tier.lookup(&keys([0, 1]));
        assert_eq!(found, [Presence::Absent; 2], "{policy}");
    }
}

#[test]
fn waiting_requests_keep_no_more_than_their_share() {
    let mut requests = Requests::lru(8);
    for request in 0..8 {
        requests.store(1, request, &keys([request])).unwrap();
    }
    requests.tier.finish(1, None);
    for request in 0..8_u32 {
        requests.observe(10 + request, &keys([u64::from(request)]));
        requests.tier.waits(10 + request);
    }
    assert_eq!(requests.tier.awaited(), (4, 4 * ROW));
}

#[test]
fn rows_that_several_requests_wait_for_count_once_and_stay_for_the_last() {
    let mut requests = Requests::lru(4);
    requests.store(1, 0, &keys([0, 1])).unwrap();
    requests.tier.finish(1, None);
    for request in [5, 6] {
        requests.observe(request, &keys([0, 1]));
        requests.tier.waits(request);
    }
    assert_eq!(requests.tier.awaited(), (2, 2 * ROW));
    requests.tier.runs(5);
    requests.victims(6);
    assert_eq!(requests.tier.lookup(&keys([0, 1])), [Presence::Ready; 2]);
    requests.tier.finish(6, None);
    assert_eq!(requests.tier.awaited(), (0, 0));
}

#[test]
fn a_store_that_finds_no_other_room_takes_it_from_who_came_last() {
    let mut requests = Requests::lru(4);
    requests.store(1, 0, &keys([0, 1, 2, 3])).unwrap();
    requests.tier.finish(1, None);
    for request in [5, 6] {
        let own = u64::from(request) - 5;
        requests.observe(request, &keys([own]));
        requests.tier.waits(request);
    }
    requests.store(9, 0, &keys([20, 21, 22])).unwrap();
    assert_eq!(
        requests.tier.lookup(&keys([0, 1])),
        [Presence::Ready, Presence::Absent]
    );
    assert_eq!(requests.number("unprotected_requests"), 1);
    assert_eq!(requests.tier.awaited(), (1, ROW));
}

#[test]
fn no_row_stays_for_a_waiting_request_where_that_is_switched_off() {
    let tier = CpuTier::new(CpuOptions {
        arena_bytes: 4 * ROW,
        row_bytes: vec![(GroupId(0), ROW)],
        awaited_share: 0,
        ..CpuOptions::default()
    });
    let mut requests = Requests {
        tier: tier.unwrap(),
    };
    requests.store(1, 0, &keys([0, 1])).unwrap();
    requests.observe(2, &keys([0, 1]));
    requests.tier.waits(2);
    assert_eq!(requests.tier.awaited(), (0, 0));
    requests.victims(4);
    assert_eq!(requests.tier.lookup(&keys([0, 1])), [Presence::Absent; 2]);
}

#[test]
fn rows_that_are_worth_less_than_what_would_go_for_them_are_not_stored() {
    let mut requests = Requests::new(64, "th");
    let (mut next, mut id, mut minutes) = (1_000_000, 0, 0);
    let mut turn = |requests: &mut Requests, chunks: Vec<Key>, minutes: u64| {
        id += 1;
        requests.tier.set_time(minutes * 60_000);
        requests.observe(id, &chunks);
        requests.store(id, 0, &chunks).unwrap();
        requests.tier.finish(id, None);
    };
    for session in 0..40 {
        for chunks in [8, 16, 24] {
            minutes += 1;
            let first = session * 100;
            turn(&mut requests, keys(first..first + chunks), minutes);
            for _ in 0..6 {
                turn(&mut requests, keys(next..next + 8), minutes);
                next += 8;
            }
        }
    }
    assert!(requests.number("bypassed_stores") > 0);
    assert_eq!(requests.number("unadmitted_stores"), 0);
    // A tier below has what it promotes stored all the same.
    let prepared = requests
        .tier
        .prepare_store(&keys(next..next + 60), User::Tier);
    assert_eq!(prepared.unwrap().unwrap().positions.len(), 60);
}

#[test]
fn nothing_is_left_of_requests_that_a_reset_came_upon() {
    let mut requests = Requests::lru(4);
    requests.store(1, 0, &keys([0, 1])).unwrap();
    requests.observe(2, &keys([0, 1, 2]));
    requests.tier.waits(2);
    let held = requests.tier.hold_ready(&keys([0]));
    requests.tier.reset();
    assert_eq!(requests.tier.awaited().1, 0);
    requests.tier.let_go(&[held[0].unwrap().handle], true);
    requests.store(2, 0, &keys([0, 1, 2])).unwrap();
    requests.tier.finish(2, Some(1));
    requests.tier.finish(1, Some(1));
    assert_eq!(requests.tier.awaited(), (0, 0));
    assert_eq!(requests.number("observed_requests"), 0);
    assert_eq!(requests.number("rows_in_use"), 0);
    assert_eq!(requests.victims(4), keys([2, 1, 0]));
}

/// A tier of two groups with rows of these sizes, in an arena of one slab or more.
fn two_groups(arena_bytes: u64, sizes: [u64; 2]) -> CpuTier {
    let options = CpuOptions {
        arena_bytes,
        row_bytes: vec![(GroupId(0), sizes[0]), (GroupId(1), sizes[1])],
        ..CpuOptions::default()
    };
    CpuTier::new(options).unwrap()
}

#[test]
fn a_store_that_does_not_fit_either_way_leaves_what_waits_alone() {
    let mut requests = Requests::lru(100);
    requests.store(1, 0, &keys(0..100)).unwrap();
    requests.tier.finish(1, None);
    for (request, rows) in [(5, 0..20), (6, 10..30)] {
        requests.observe(request, &keys(rows));
        requests.tier.waits(request);
    }
    let before = requests.tier.awaited();
    assert_eq!(before, (2, 30 * ROW));
    assert_eq!(requests.store(9, 0, &keys(1_000..1_101)), None);
    assert_eq!(requests.tier.awaited(), before);
    assert_eq!(requests.number("unprotected_requests"), 0);
    // With a row in use, neither do a hundred.
    let held = requests.tier.hold_ready(&keys([50]));
    assert_eq!(requests.store(9, 0, &keys(1_000..1_100)), None);
    assert_eq!(requests.tier.awaited(), before);
    requests.tier.let_go(&[held[0].unwrap().handle], true);
    // Rows that stay are still pinned, and the order is what it was.
    let gone = requests.store(9, 0, &keys(1_000..1_070)).unwrap();
    assert_eq!(gone, keys((30..100).rev()));
    assert_eq!(requests.tier.awaited(), before);
    // What fits takes as much as it needs, and no more.
    assert!(requests.store(10, 0, &keys(2_000..2_080)).is_some());
    assert_eq!(requests.tier.awaited(), (1, 20 * ROW));
    assert_eq!(requests.number("unprotected_requests"), 1);
}

#[test]
fn loads_from_below_take_nothing_from_requests_that_wait() {
    let mut requests = Requests::lru(8);
    requests.store(1, 0, &keys(0..8)).unwrap();
    requests.tier.finish(1, None);
    requests.observe(5, &keys(0..4));
    requests.tier.waits(5);
    let tier = &mut requests.tier;
    assert!(
        tier.prepare_store(&keys(20..25), User::Tier)
            .unwrap()
            .is_none()
    );
    assert_eq!(tier.awaited(), (1, 4 * ROW));
    assert!(
        tier.prepare_store(&keys(20..24), User::Tier)
            .unwrap()
            .is_some()
    );
    assert_eq!(tier.awaited(), (1, 4 * ROW));
    assert_eq!(tier.lookup(&keys(0..4)), [Presence::Ready; 4]);
}

#[test]
fn of_groups_with_rows_of_two_sizes_the_head_of_the_prompt_stays_whole() {
    let mut tier = two_groups(96 * ROW, [ROW, 2 * ROW]);
    let chunks: Vec<(Key, u64)> = (0..20)
        .flat_map(|chunk| [0, 1].map(|group| (key(chunk, group), (chunk + 1) * TOKENS)))
        .collect();
    let named: Vec<Key> = chunks.iter().map(|(key, _)| *key).collect();
    assert!(tier.prepare_store(&named, User::Worker).unwrap().is_some());
    assert_eq!(tier.complete_store(&named, true).len(), 40);
    tier.observe(5, &chunks, Context::default());
    tier.waits(5);
    // Half of the arena is sixteen chunks of three rows' bytes each; nothing of the next one stays.
    assert_eq!(tier.awaited(), (1, 48 * ROW));
    let heads: Vec<Key> = chunks.iter().take(32).map(|(key, _)| *key).collect();
    // Rows that are being written fill all the rest.
    for number in 0..200 {
        for group in [0, 1] {
            let other = [key(1_000 + number, group)];
            tier.prepare_store(&other, User::Tier).unwrap();
        }
    }
    assert_eq!(tier.lookup(&heads), [Presence::Ready; 32]);
    assert_eq!(tier.lookup(&named[32..]), [Presence::Absent; 8]);
}

#[test]
fn a_request_longer_than_the_arena_keeps_the_order_of_what_stays() {
    let mut requests = Requests::lru(300);
    requests.observe(7, &[]);
    for store in 0..20_u64 {
        let first = store * 100;
        requests.store(7, first, &keys(first..first + 100)).unwrap();
    }
    let there = requests.tier.lookup(&keys(0..200));
    assert_eq!(there, vec![Presence::Ready; 200], "the head stays");
    let last: Vec<u64> = (1_900..2_000).rev().collect();
    assert_eq!(requests.victims(150)[..100], keys(last)[..]);
}

#[test]
fn groups_that_come_after_each_other_stand_in_the_order_of_the_prompt() {
    let mut tier = two_groups(12 * ROW, [ROW, ROW]);
    let ends: Vec<Option<u64>> = (1..=4).map(|chunk| Some(chunk * TOKENS)).collect();
    let asker = Asker {
        request: 7,
        ends: &ends,
    };
    for group in [1, 0] {
        let own: Vec<Key> = (0..4).map(|chunk| key(chunk, group)).collect();
        tier.prepare_store_for(asker, &own, User::Worker)
            .unwrap()
            .unwrap();
        tier.complete_store(&own, true);
    }
    tier.finish(7, None);
    let mut gone = Vec::new();
    for number in 0..12 {
        let other = [key(1_000 + number, 0)];
        gone.extend(
            tier.prepare_store(&other, User::Worker)
                .unwrap()
                .unwrap()
                .evicted,
        );
        tier.complete_store(&other, true);
    }
    let chunks: Vec<u64> = gone
        .iter()
        .map(|key| {
            (0..4)
                .find(|chunk| {
                    [0, 1]
                        .iter()
                        .any(|group| *key == crate::key(*chunk, *group))
                })
                .unwrap()
        })
        .collect();
    assert_eq!(chunks, [3, 3, 2, 2, 1, 1, 0, 0]);
}

#[test]
fn a_group_that_is_offered_later_counts_up_to_the_tokens_that_another_was_offered_for() {
    let mut tier = CpuTier::new(CpuOptions {
        arena_bytes: 64 * ROW,
        row_bytes: vec![(GroupId(0), ROW), (GroupId(1), ROW)],
        admission: AdmissionOptions {
            store_threshold: 2,
            ..AdmissionOptions::default()
        },
        ..CpuOptions::default()
    })
    .unwrap();
    let mut stored = Vec::new();
    for request in [7, 8] {
        for group in [0, 1] {
            let ends = [Some(TOKENS), Some(2 * TOKENS)];
            let asker = Asker {
                request,
                ends: &ends,
            };
            let own = [key(0, group), key(1, group)];
            let prepared = tier.prepare_store_for(asker, &own, User::Worker).unwrap();
            stored.push(prepared.unwrap().positions.len());
            // Again: the same request counts once.
            if request == 7 {
                let again = tier.prepare_store_for(asker, &own, User::Worker).unwrap();
                assert!(again.unwrap().positions.is_empty());
            }
        }
        tier.finish(request, None);
    }
    assert_eq!(stored, [0, 0, 2, 2]);
}
