//! What requests are told, what is loaded for them, and when.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that fails may panic"
)]

use std::collections::{HashMap, HashSet};

use kvstrata_core::cpu::{CpuOptions, CpuTier, Handle, User};
use kvstrata_core::eviction::request::Context;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::manager::Answer::{self, Hit, Miss, Pending, Retry};
use kvstrata_core::manager::{
    Allowed, Manager, ManagerOptions, Outcome, Outside, RequestId, Start, StepEnd,
};

const ROW: u64 = 1024;
const TOKENS: u64 = 16;

fn key(number: u64, group: u32) -> Key {
    let mut bytes = vec![0; 24];
    bytes.extend(number.to_be_bytes());
    bytes.extend(group.to_be_bytes());
    Key::new(&bytes).unwrap()
}

fn keys(numbers: impl IntoIterator<Item = u64>, group: u32) -> Vec<Key> {
    numbers
        .into_iter()
        .map(|number| key(number, group))
        .collect()
}

/// The token that chunk `number`, counted from 1, ends with.
fn end_of(key: &Key) -> u64 {
    let number: [u8; 8] = key.as_bytes()[24..32].try_into().unwrap();
    u64::from_be_bytes(number) * TOKENS
}

/// Tiers below: what they have, and keys they do not know of yet.
#[derive(Default)]
struct Below {
    rows: Vec<HashSet<Key>>,
    unknown: HashSet<Key>,
    asked: HashMap<Key, usize>,
}

impl Outside for Below {
    fn has(&mut self, tier: usize, key: &Key) -> Option<bool> {
        *self.asked.entry(*key).or_default() += 1;
        (!self.unknown.contains(key)).then(|| self.rows[tier].contains(key))
    }

    fn position(&mut self, _: RequestId, key: &Key) -> Option<u64> {
        Some(end_of(key))
    }
}

struct Stack {
    cpu: CpuTier,
    manager: Manager,
    below: Below,
    now: f64,
    loading: Vec<(Key, Handle)>,
    started: Vec<Key>,
}

/// A manager over `slots` slots and one tier; requests wait for 10 seconds at most.
fn stack(slots: u64) -> Stack {
    stack_of(slots, 1, 500)
}

fn stack_of(slots: u64, tiers: usize, share: u32) -> Stack {
    let row_bytes = vec![(GroupId(0), ROW), (GroupId(1), ROW)];
    let cpu = CpuTier::new(CpuOptions {
        arena_bytes: slots * ROW,
        align: 64,
        row_bytes,
        policy: "lru".to_owned(),
        ..CpuOptions::default()
    });
    let manager = Manager::new(ManagerOptions {
        tiers,
        wait_seconds: 10.0,
        share,
        request_share: 750,
        tokens: vec![(GroupId(0), TOKENS), (GroupId(1), TOKENS)],
    });
    Stack {
        cpu: cpu.unwrap(),
        manager,
        below: Below {
            rows: vec![HashSet::new(); tiers],
            ..Below::default()
        },
        now: 0.0,
        loading: Vec::new(),
        started: Vec::new(),
    }
}

impl Stack {
    fn request(&mut self) -> RequestId {
        self.manager.begin(Allowed::ALL, true).unwrap()
    }

    fn ask(&mut self, id: RequestId, key: &Key) -> Answer {
        self.manager.lookup(&mut self.cpu, id, key, &mut self.below)
    }

    /// Asks from the front to the first miss, as for a group that needs every row.
    fn prefix(&mut self, id: RequestId, keys: &[Key]) -> Vec<Answer> {
        let mut answers = Vec::new();
        for key in keys {
            answers.push(self.ask(id, key));
            if answers.last() == Some(&Miss) {
                break;
            }
        }
        answers
    }

    /// Asks from the back until `window` in a row are there; how many rows the hit has.
    fn window(&mut self, id: RequestId, keys: &[Key], window: usize) -> usize {
        let mut run = 0;
        for (at, key) in keys.iter().enumerate().rev() {
            match self.ask(id, key) {
                Miss | Retry => run = 0,
                Hit | Pending => run += 1,
            }
            if run == window {
                return at + window;
            }
        }
        run
    }

    /// Ends a step; the keys whose loads it started.
    fn step(&mut self) -> Vec<Key> {
        let done = self.end_step();
        let starts: Vec<&Start> = done.starts.iter().collect();
        let mut keys = Vec::new();
        for start in starts {
            keys.extend(&start.keys);
            self.loading.extend(
                start
                    .keys
                    .iter()
                    .copied()
                    .zip(start.handles.iter().copied()),
            );
        }
        self.started.extend(&keys);
        keys
    }

    fn end_step(&mut self) -> StepEnd {
        self.now += 0.001;
        self.manager
            .end_step(&mut self.cpu, self.now, &mut self.below)
    }

    /// All loads under way end, those of `bad` keys without a row.
    fn arrive(&mut self, bad: &[Key]) {
        let rows: Vec<(Key, Handle, Outcome)> = self
            .loading
            .drain(..)
            .map(|(key, handle)| {
                let outcome = if bad.contains(&key) {
                    Outcome::Bad
                } else {
                    Outcome::Good
                };
                (key, handle, outcome)
            })
            .collect();
        self.manager.load_ended(&mut self.cpu, &rows);
    }

    /// Asks for a prefix, step by step, until nothing is on its way.
    fn wait_for(&mut self, id: RequestId, keys: &[Key]) -> Vec<Answer> {
        for _ in 0..200 {
            let answers = self.prefix(id, keys);
            if !answers.contains(&Pending) && !answers.contains(&Retry) {
                return answers;
            }
            self.step();
            self.arrive(&[]);
        }
        panic!("never came");
    }

    fn store(&mut self, keys: &[Key]) -> bool {
        let prepared = self.manager.prepare_store(&mut self.cpu, None, keys, &[]);
        if prepared.unwrap().is_none() {
            return false;
        }
        self.manager.complete_store(&mut self.cpu, keys, true);
        true
    }

    fn stat(&self, name: &str) -> u64 {
        self.manager.stats()[name].as_u64().unwrap()
    }

    fn in_use(&self) -> u64 {
        self.cpu.stats()["rows_in_use"].as_u64().unwrap()
    }
}

#[test]
fn a_lookup_takes_no_slot_and_starts_nothing() {
    let mut stack = stack(8);
    let wanted = keys(1..4, 0);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    assert_eq!(stack.prefix(id, &wanted), [Pending; 3]);
    assert_eq!(stack.cpu.stats()["rows"], 0);
    assert_eq!(stack.step(), wanted);
    assert_eq!(stack.cpu.stats()["rows"], 3);
}

#[test]
fn rows_behind_the_span_that_all_groups_agree_on_are_not_loaded() {
    let mut stack = stack(64);
    let full = keys(1..=20, 0);
    let window = keys(1..=20, 1);
    stack.below.rows[0].extend(&full);
    // Only chunks 7 and 8 of the group with the window were kept, and chunk 20 alone.
    stack.below.rows[0].extend([window[6], window[7], window[19]]);
    let id = stack.request();
    assert_eq!(stack.prefix(id, &full), [Pending; 20]);
    assert_eq!(stack.window(id, &window, 2), 8);
    let mut expected = full[..8].to_vec();
    expected.extend([window[7], window[6]]);
    assert_eq!(stack.step(), expected);
}

#[test]
fn of_a_group_with_a_window_only_the_window_is_loaded() {
    let mut stack = stack(8);
    let window = keys(1..=100, 1);
    stack.below.rows[0].extend(&window);
    let id = stack.request();
    assert_eq!(stack.window(id, &window, 2), 100);
    assert_eq!(stack.step(), [window[99], window[98]]);
    assert_eq!(stack.below.asked.len(), 2);
}

#[test]
fn a_window_that_ends_behind_the_prefix_is_asked_again_where_the_prefix_ends() {
    let mut stack = stack(64);
    let (full, window) = (keys(1..=10, 0), keys(1..=10, 1));
    stack.below.rows[0].extend(&full[..6]);
    stack.below.rows[0].extend(&window);
    let id = stack.request();
    stack.prefix(id, &full);
    stack.window(id, &window, 2);
    assert_eq!(stack.step(), full[..6]);
    stack.arrive(&[]);
    // The scheduler knows now that the hit has six chunks at most.
    stack.prefix(id, &full);
    assert_eq!(stack.window(id, &window[..6], 2), 6);
    assert_eq!(stack.step(), [window[5], window[4]]);
}

#[test]
fn a_request_that_nothing_comes_for_gets_all_that_it_asked_for() {
    let mut stack = stack(64);
    let (full, window) = (keys(1..=2, 0), keys(1..=9, 1));
    stack.below.rows[0].extend(&full);
    stack.below.rows[0].insert(window[8]);
    let id = stack.request();
    // The window's only row lies behind the prefix, which is there already.
    assert!(stack.store(&full));
    stack.prefix(id, &full);
    assert_eq!(stack.ask(id, &window[8]), Pending);
    assert_eq!(stack.step(), [window[8]]);
}

#[test]
fn requests_that_want_the_same_rows_share_one_load() {
    let mut stack = stack(400);
    let wanted = keys(1..=100, 0);
    stack.below.rows[0].extend(&wanted);
    let ids: Vec<RequestId> = (0..50).map(|_| stack.request()).collect();
    for id in &ids {
        assert_eq!(stack.prefix(*id, &wanted), [Pending; 100]);
    }
    assert_eq!(stack.step().len(), 100);
    // A later one joins, too, without the tier being asked again.
    let late = stack.request();
    assert_eq!(stack.prefix(late, &wanted), [Pending; 100]);
    assert_eq!(stack.step().len(), 0);
    stack.arrive(&[]);
    for id in ids.iter().chain([&late]) {
        assert_eq!(stack.prefix(*id, &wanted), [Hit; 100]);
        assert_eq!(stack.manager.source(*id, &wanted[0]), Some(0));
    }
    assert_eq!(stack.started.len(), 100);
    assert_eq!(stack.below.asked[&wanted[0]], 50);
}

#[test]
fn a_span_larger_than_the_free_space_comes_in_waves() {
    let mut stack = stack(16);
    let wanted = keys(1..=10, 0);
    stack.below.rows[0].extend(&wanted);
    let busy = keys(100..112, 0);
    assert!(stack.store(&busy));
    let held = stack.cpu.hold_ready(&busy);
    let id = stack.request();
    assert_eq!(stack.prefix(id, &wanted), [Pending; 10]);
    assert_eq!(stack.step(), wanted[..4]);
    stack.arrive(&[]);
    for place in &held[..4] {
        stack.cpu.let_go(&[place.unwrap().handle], true);
    }
    assert_eq!(stack.prefix(id, &wanted)[3..5], [Hit, Pending]);
    assert_eq!(stack.step(), wanted[4..8]);
    stack.arrive(&[]);
    for place in &held[4..] {
        stack.cpu.let_go(&[place.unwrap().handle], true);
    }
    assert_eq!(stack.wait_for(id, &wanted), [Hit; 10]);
    assert_eq!(stack.started.len(), 10);
}

#[test]
fn no_room_means_waiting_and_no_miss() {
    let mut stack = stack(4);
    let (busy, wanted) = (keys(100..104, 0), keys(1..=2, 0));
    assert!(stack.store(&busy));
    let held = stack.cpu.hold_ready(&busy);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    for _ in 0..5 {
        assert_eq!(stack.prefix(id, &wanted), [Pending; 2]);
        assert_eq!(stack.step(), []);
    }
    assert!(stack.manager.is_pending());
    for place in held {
        stack.cpu.let_go(&[place.unwrap().handle], true);
    }
    assert_eq!(stack.wait_for(id, &wanted), [Hit; 2]);
}

#[test]
fn a_request_that_waited_too_long_goes_on_with_misses_and_others_go_on_waiting() {
    let mut stack = stack(8);
    let wanted = keys(1..=2, 0);
    stack.below.rows[0].extend(&wanted);
    let first = stack.request();
    assert_eq!(stack.prefix(first, &wanted), [Pending; 2]);
    stack.step();
    stack.now = 9.0;
    let second = stack.request();
    assert_eq!(stack.prefix(first, &wanted), [Pending; 2]);
    assert_eq!(stack.prefix(second, &wanted), [Pending; 2]);
    assert_eq!(stack.end_step().timed_out, None);
    stack.now = 10.1;
    assert_eq!(stack.prefix(first, &wanted), [Pending; 2]);
    assert_eq!(stack.end_step().timed_out, Some(wanted[0]));
    assert_eq!(stack.prefix(first, &wanted), [Miss]);
    assert_eq!(stack.prefix(second, &wanted), [Pending; 2]);
    stack.end_step();
    stack.arrive(&[]);
    assert_eq!(
        stack.prefix(first, &wanted),
        [Hit; 2],
        "what is there is a hit"
    );
    assert_eq!((stack.stat("waits"), stack.stat("timed_out_waits")), (2, 1));
}

#[test]
fn a_request_that_cannot_ask_because_the_engine_is_full_may_wait_for_its_rows_when_it_can() {
    let mut stack = stack(8);
    let wanted = keys(1..=2, 0);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    assert_eq!(stack.prefix(id, &wanted), [Pending; 2]);
    assert_eq!(stack.step(), wanted);
    stack.arrive(&[]);
    assert_eq!(stack.stat("held_rows"), 2);
    for second in 1..60 {
        stack.now = f64::from(second);
        assert_eq!(stack.end_step().timed_out, None);
    }
    assert_eq!(stack.stat("held_rows"), 0, "they do not take room for ever");
    assert!(stack.store(&keys(11..=18, 0)), "they make room");
    assert_eq!(stack.wait_for(id, &wanted), [Hit; 2]);
    assert_eq!(stack.stat("timed_out_waits"), 0);
}

#[test]
fn a_request_that_asks_now_and_then_waits_too_long_at_last() {
    let mut stack = stack(4);
    let wanted = keys(1..=1, 0);
    stack.below.unknown.extend(&wanted);
    let id = stack.request();
    let mut steps = 0;
    while stack.prefix(id, &wanted) == [Retry] {
        stack.step();
        for _ in 0..3 {
            stack.now += 1.0;
            stack.step();
        }
        steps += 1;
        assert!(steps < 20, "it waits for ever");
    }
    assert!(steps > 4, "{steps}");
}

#[test]
fn a_row_that_a_worker_refused_is_not_given_again_to_a_request_that_had_it() {
    let mut stack = stack(8);
    let wanted = keys(1..=2, 0);
    stack.below.rows[0].extend(&wanted);
    let (id, other) = (stack.request(), stack.request());
    assert_eq!(stack.wait_for(id, &wanted), [Hit; 2]);
    let given = stack
        .manager
        .prepare_load(&mut stack.cpu, Some(id), &wanted, &[]);
    assert!(given.is_some());
    stack.step();
    stack.manager.refuse(&mut stack.cpu, &wanted[1..]);
    stack.manager.complete_load(&mut stack.cpu, &wanted);
    assert_eq!(stack.prefix(id, &wanted), [Hit, Miss]);
    stack.step();
    assert_eq!(stack.wait_for(other, &wanted), [Hit; 2], "others may try");
    stack.step();
    assert_eq!(
        stack.prefix(id, &wanted),
        [Hit, Miss],
        "also when it is there"
    );
}

#[test]
fn a_writer_that_never_ends_holds_nobody_up_for_longer() {
    let mut stack = stack(4);
    let wanted = keys(1..=1, 0);
    let prepared = stack.cpu.prepare_store(&wanted, User::Worker);
    assert!(prepared.unwrap().is_some());
    let id = stack.request();
    assert_eq!(stack.prefix(id, &wanted), [Pending]);
    stack.end_step();
    stack.now = 10.1;
    assert_eq!(stack.prefix(id, &wanted), [Pending]);
    stack.end_step();
    assert_eq!(stack.prefix(id, &wanted), [Miss]);
}

#[test]
fn a_tier_that_never_knows_is_asked_again_for_so_long_only() {
    let mut stack = stack(4);
    let wanted = keys(1..=1, 0);
    stack.below.unknown.extend(&wanted);
    let id = stack.request();
    assert_eq!(stack.prefix(id, &wanted), [Retry]);
    stack.end_step();
    stack.now = 10.1;
    assert_eq!(stack.prefix(id, &wanted), [Retry]);
    stack.end_step();
    assert_eq!(stack.prefix(id, &wanted), [Miss]);
}

#[test]
fn what_an_aborted_request_wanted_is_not_loaded_unless_another_waits_for_it() {
    let mut stack = stack(4);
    let busy = keys(100..104, 0);
    assert!(stack.store(&busy));
    let held = stack.cpu.hold_ready(&busy);
    let wanted = keys(1..=3, 0);
    stack.below.rows[0].extend(&wanted);
    let (first, second) = (stack.request(), stack.request());
    assert_eq!(stack.prefix(first, &wanted), [Pending; 3]);
    assert_eq!(stack.prefix(second, &wanted[..1]), [Pending]);
    assert_eq!(stack.step(), []);
    stack.manager.end(&mut stack.cpu, first, None);
    assert!(stack.manager.is_pending());
    assert_eq!(stack.stat("queued_rows"), 1);
    for place in held {
        stack.cpu.let_go(&[place.unwrap().handle], true);
    }
    assert_eq!(stack.step(), wanted[..1]);
    stack.manager.end(&mut stack.cpu, second, None);
    stack.arrive(&[]);
    assert!(!stack.manager.is_pending());
    assert_eq!(stack.in_use(), 0);
}

#[test]
fn queued_requests_leave_room_for_stores() {
    let mut stack = stack(100);
    let ids: Vec<RequestId> = (0..50).map(|_| stack.request()).collect();
    for (number, id) in (0..50).zip(&ids) {
        let wanted = keys(1000 + number * 10..1010 + number * 10, 0);
        stack.below.rows[0].extend(&wanted);
        assert_eq!(stack.prefix(*id, &wanted), [Pending; 10]);
    }
    assert_eq!(stack.step().len(), 50, "half of the arena");
    assert_eq!(stack.stat("queued_rows"), 450);
    assert!(stack.store(&keys(1..=20, 0)));
    stack.arrive(&[]);
    assert_eq!(
        stack.step().len(),
        0,
        "what has come is held until it is taken"
    );
    let first = keys(1000..1010, 0);
    assert_eq!(stack.prefix(ids[0], &first), [Hit; 10]);
    let places = stack
        .manager
        .prepare_load(&mut stack.cpu, Some(ids[0]), &first, &[]);
    assert_eq!(places.unwrap().len(), 10);
    assert_eq!(stack.step().len(), 10);
}

#[test]
fn rows_that_came_stay_until_those_who_waited_have_them() {
    let mut stack = stack(4);
    let wanted = keys(1..=2, 0);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    stack.prefix(id, &wanted);
    stack.step();
    stack.arrive(&[]);
    assert_eq!(stack.stat("held_rows"), 2);
    assert!(!stack.store(&keys(10..13, 0)), "only two slots are free");
    assert!(stack.store(&keys(10..12, 0)));
    assert_eq!(stack.prefix(id, &wanted), [Hit; 2]);
    assert!(
        stack
            .manager
            .prepare_load(&mut stack.cpu, Some(id), &wanted, &[])
            .is_some()
    );
    stack.step();
    stack.manager.complete_load(&mut stack.cpu, &wanted);
    assert_eq!((stack.stat("held_rows"), stack.in_use()), (0, 0));
}

#[test]
fn rows_that_a_request_found_and_did_not_take_are_let_go() {
    let mut stack = stack(4);
    let wanted = keys(1..=2, 0);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    assert_eq!(stack.wait_for(id, &wanted), [Hit; 2]);
    assert_eq!(stack.in_use(), 2);
    stack.step();
    assert_eq!((stack.stat("held_rows"), stack.in_use()), (0, 0));
    assert!(stack.store(&keys(10..14, 0)));
}

#[test]
fn a_failed_row_is_a_miss_for_its_waiters_and_the_rest_of_the_span_is_released() {
    let mut stack = stack(64);
    let groups: Vec<Vec<Key>> = (0..2).map(|group| keys(1..=10, group)).collect();
    stack.below.rows[0].extend(groups.iter().flatten());
    let id = stack.request();
    for group in &groups {
        assert_eq!(stack.prefix(id, group), [Pending; 10]);
    }
    assert_eq!(stack.step().len(), 20);
    stack.arrive(&[groups[1][5]]);
    assert_eq!(stack.prefix(id, &groups[0]), [Hit; 10]);
    let mut expected = vec![Hit; 5];
    expected.push(Miss);
    assert_eq!(
        stack.prefix(id, &groups[1]),
        expected,
        "the tier still says that it has it"
    );
    stack.step();
    assert_eq!(stack.in_use(), 0);
    let other = stack.request();
    assert_eq!(stack.ask(other, &groups[1][5]), Pending);
}

#[test]
fn a_span_that_never_fits_is_cut_and_its_head_is_loaded() {
    let mut stack = stack(16);
    let (full, window) = (keys(1..=40, 0), keys(1..=40, 1));
    stack.below.rows[0].extend(full.iter().chain(&window));
    let id = stack.request();
    assert_eq!(stack.prefix(id, &full), [Pending; 40]);
    assert_eq!(stack.window(id, &window, 2), 40);
    // Twelve slots are one request's share; two are for the window.
    assert_eq!(stack.step(), full[..10]);
    for _ in 0..2 {
        stack.arrive(&[]);
        let answers = stack.prefix(id, &full);
        assert_eq!(answers.len(), 11, "ten rows, and then a miss");
        assert_eq!(stack.window(id, &window[..10], 2), 10);
        stack.step();
    }
    assert_eq!(stack.prefix(id, &full)[..10], [Hit; 10]);
    assert_eq!(stack.ask(id, &window[9]), Hit);
    assert_eq!(stack.stat("cut_spans"), 1);
}

#[test]
fn what_a_request_may_not_load_from_is_not_asked() {
    let mut stack = stack_of(8, 2, 500);
    let wanted = keys(1..=1, 0);
    stack.below.rows[0].extend(&wanted);
    stack.below.rows[1].extend(&wanted);
    let only_second = Allowed {
        cpu: false,
        below: 0b10,
    };
    let id = stack.manager.begin(only_second, true).unwrap();
    assert_eq!(stack.prefix(id, &wanted), [Pending]);
    let done = stack.end_step();
    assert_eq!(done.starts[0].tier, 1);
    let rows = [(wanted[0], done.starts[0].handles[0], Outcome::Good)];
    stack.manager.load_ended(&mut stack.cpu, &rows);
    assert_eq!(stack.prefix(id, &wanted), [Hit], "it came for this request");
    let another = stack.manager.begin(only_second, true).unwrap();
    assert_eq!(stack.prefix(another, &wanted), [Miss]);
    let nowhere = stack.manager.begin(Allowed::NONE, true).unwrap();
    assert_eq!(stack.prefix(nowhere, &wanted), [Miss]);
}

#[test]
fn a_reset_ends_every_wait_and_late_rows_end_into_nothing() {
    let mut stack = stack(8);
    let wanted = keys(1..=4, 0);
    stack.below.rows[0].extend(&wanted);
    let id = stack.request();
    stack.prefix(id, &wanted);
    stack.step();
    let late = stack.loading.clone();
    stack.manager.reset(&mut stack.cpu);
    assert!(!stack.manager.is_pending());
    // The same rows are wanted and loaded again before the first load has ended.
    assert_eq!(stack.prefix(id, &wanted), [Pending; 4]);
    stack.loading.clear();
    assert_eq!(stack.step(), wanted);
    let rows: Vec<_> = late
        .iter()
        .map(|(key, handle)| (*key, *handle, Outcome::Good))
        .collect();
    assert_eq!(stack.manager.load_ended(&mut stack.cpu, &rows), []);
    assert_eq!(stack.prefix(id, &wanted), [Pending; 4]);
    stack.arrive(&[]);
    assert_eq!(stack.prefix(id, &wanted), [Hit; 4]);
    stack.manager.end(&mut stack.cpu, id, None);
    assert_eq!(stack.in_use(), 0);
}

#[test]
fn a_request_accesses_a_row_once() {
    let mut stack = stack(3);
    for number in 1..=3 {
        assert!(stack.store(&keys([number], 0)));
    }
    let (first, second) = (stack.request(), stack.request());
    let load = |stack: &mut Stack, id, number| {
        let key = keys([number], 0);
        assert!(
            stack
                .manager
                .prepare_load(&mut stack.cpu, Some(id), &key, &[])
                .is_some()
        );
        stack.manager.complete_load(&mut stack.cpu, &key);
    };
    load(&mut stack, first, 1);
    load(&mut stack, second, 2);
    load(&mut stack, second, 3);
    load(&mut stack, first, 1);
    let prepared = stack.cpu.prepare_store(&keys([9], 0), User::Worker);
    assert_eq!(prepared.unwrap().unwrap().evicted, keys([1], 0));
}

#[test]
fn contexts_that_nobody_began_are_forgotten_when_they_ask_no_more() {
    let mut stack = stack(4);
    assert!(stack.store(&keys([1], 0)));
    let stranger = stack.manager.begin(Allowed::ALL, false).unwrap();
    assert_eq!(stack.ask(stranger, &key(1, 0)), Hit);
    stack.step();
    assert_eq!(stack.manager.take_forgotten(), []);
    stack.step();
    assert_eq!(stack.manager.take_forgotten(), [stranger]);
    assert_eq!(stack.stat("requests"), 0);
}

#[test]
fn requests_that_hold_what_the_others_lack_do_not_wait_for_each_other() {
    let mut stack = stack(12);
    // Each has two of its rows in the CPU tier and two below; together they fill all slots.
    let prompts: Vec<Vec<Key>> = (0..6)
        .map(|number| keys(number * 10 + 1..number * 10 + 5, 0))
        .collect();
    for prompt in &prompts {
        assert!(stack.store(&prompt[..2]));
        stack.below.rows[0].extend(prompt);
    }
    let ids: Vec<RequestId> = prompts.iter().map(|_| stack.request()).collect();
    let mut done = vec![false; ids.len()];
    for _ in 0..40 {
        for (number, id) in ids.iter().enumerate().filter(|(number, _)| !done[*number]) {
            let prompt = &prompts[number];
            if stack.prefix(*id, prompt) == [Hit; 4] {
                let taken = stack
                    .manager
                    .prepare_load(&mut stack.cpu, Some(*id), prompt, &[]);
                assert!(taken.is_some());
                stack.manager.complete_load(&mut stack.cpu, prompt);
                done[number] = true;
                break;
            }
        }
        let done: Vec<usize> = (0..6).filter(|number| done[*number]).collect();
        let first: Vec<usize> = (0..done.len()).collect();
        assert_eq!(done, first, "the first in line goes first");
        stack.step();
        stack.arrive(&[]);
    }
    assert_eq!(done, [true; 6]);
    assert_eq!(stack.stat("timed_out_waits"), 0);
}

#[test]
fn a_load_in_waves_leaves_the_rows_of_a_request_that_waits() {
    let mut stack = stack_of(100, 1, 500);
    let (own, other, wanted) = (keys(0..30, 0), keys(100..160, 0), keys(200..230, 0));
    assert!(stack.store(&own) && stack.store(&other));
    let waits = stack.request();
    let named: Vec<(Key, u64)> = own.iter().map(|key| (*key, end_of(key))).collect();
    stack
        .manager
        .observe(&mut stack.cpu, waits, &named, Context::default(), 0.0);
    assert_eq!(stack.cpu.awaited(), (1, 30 * ROW));
    let busy = stack.cpu.prepare_load(&other).unwrap();
    assert_eq!(busy.len(), 60);
    stack.below.rows[0].extend(&wanted);
    let loads = stack.request();
    stack.prefix(loads, &wanted);
    assert_eq!(stack.step(), wanted[..10]);
    assert_eq!(stack.cpu.awaited(), (1, 30 * ROW));
    stack.arrive(&[]);
    // No other room, and nothing on its way: now they have to go.
    stack.prefix(loads, &wanted);
    assert_eq!(stack.step(), wanted[10..]);
    assert_eq!(stack.cpu.awaited().0, 0);
    stack.cpu.complete_load(&other);
}

#[test]
fn where_a_tier_is_below_no_row_is_left_out_of_the_arena() {
    for (tiers, left_out) in [(0, true), (1, false)] {
        let mut stack = stack_of(64, tiers, 500);
        stack.cpu = CpuTier::new(CpuOptions {
            arena_bytes: 64 * ROW,
            row_bytes: vec![(GroupId(0), ROW), (GroupId(1), ROW)],
            policy: "th".to_owned(),
            ..CpuOptions::default()
        })
        .unwrap();
        let mut minutes = 0.0;
        let mut request = |stack: &mut Stack, chunks: &[Key], tokens: u32| {
            minutes += 1.0;
            let id = stack.request();
            let named: Vec<(Key, u64)> = chunks.iter().map(|key| (*key, end_of(key))).collect();
            let ends: Vec<Option<u64>> = named.iter().map(|(_, end)| Some(*end)).collect();
            let context = Context {
                prompt_tokens: Some(tokens),
                ..Context::default()
            };
            let (manager, cpu) = (&mut stack.manager, &mut stack.cpu);
            manager.observe(cpu, id, &named, context, 60.0 * minutes);
            let stored = manager.prepare_store(cpu, Some(id), chunks, &ends).unwrap();
            manager.complete_store(cpu, chunks, true);
            manager.end(cpu, id, None);
            stored.unwrap().positions.len()
        };
        // Sessions that come back every time, and long prompts that never do.
        let mut missed = false;
        for turn in 0..60_u64 {
            for session in 0..6 {
                request(
                    &mut stack,
                    &keys(session * 100..session * 100 + 8, 0),
                    1_000,
                );
            }
            let once = keys(10_000 + turn * 100..10_000 + turn * 100 + 32, 0);
            missed |= request(&mut stack, &once, 40_000) < 32;
        }
        assert_eq!(missed, left_out, "{tiers} tiers");
        let bypassed = stack.cpu.stats()["bypassed_stores"].as_u64().unwrap();
        assert_eq!(bypassed > 0, left_out);
    }
}
