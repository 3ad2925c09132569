//! Every policy against a model that knows what may go, though not in which order.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use kvstrata_core::eviction::request::{Arrival, Context, Hint, RequestId, Tag};
use kvstrata_core::eviction::th::Th;
use kvstrata_core::eviction::{
    Class, ContainerId, EntryId, EvictionPolicy, POLICIES, Placement, create,
};

const HANDLES: u32 = 300;
const CONTAINERS: u32 = 6;
/// Conversations, each a path of keys that requests go along up to some length.
const PATHS: u64 = 12;
const LENGTH: u64 = 40;

/// `SplitMix64`: a million steps must not take long to draw.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn small(&mut self, bound: u32) -> u32 {
        u32::try_from(self.below(u64::from(bound))).unwrap()
    }
}

#[derive(Clone, Copy, Debug)]
struct Row {
    container: u32,
    tag: Tag,
    pins: u32,
}

fn class_of(container: u32) -> Class {
    Class(u16::from(container >= 4))
}

/// Keys of a conversation: two share the first half.
fn tag(path: u64, position: u64) -> Tag {
    let path = if position < LENGTH / 2 {
        path / 2
    } else {
        path + 1000
    };
    Tag(Random(path * LENGTH + position).below(u64::MAX))
}

struct Checked {
    policy: Box<dyn EvictionPolicy>,
    rows: BTreeMap<u32, Row>,
    random: Random,
    milliseconds: u64,
    requests: u64,
}

impl Checked {
    fn new(policy: Box<dyn EvictionPolicy>, seed: u64) -> Self {
        Self {
            policy,
            rows: BTreeMap::new(),
            random: Random(seed),
            milliseconds: 0,
            requests: 0,
        }
    }

    fn step(&mut self) {
        let entry = self.random.small(HANDLES);
        match self.random.below(20) {
            0..=4 => self.request(),
            5..=6 => self.insert(entry),
            7 => self.policy.access(EntryId(entry)),
            8 => {
                self.rows.remove(&entry);
                self.policy.remove(EntryId(entry));
            }
            9..=11 => {
                self.rows.entry(entry).and_modify(|row| row.pins += 1);
                self.policy.pin(EntryId(entry));
            }
            12..=15 => {
                let less = |row: &mut Row| row.pins = row.pins.saturating_sub(1);
                self.rows.entry(entry).and_modify(less);
                self.policy.unpin(EntryId(entry));
            }
            16..=18 => self.evict(),
            _ => self.remove_container(),
        }
        assert_eq!(self.policy.len(), self.rows.len());
        for class in [Class(0), Class(1), Class(2)] {
            let own = |row: &&Row| row.pins == 0 && class_of(row.container) == class;
            let free = self.rows.values().filter(own).count();
            assert_eq!(self.policy.evictable(class), free);
        }
    }

    fn free(&self, class: Class, protected_below: u32) -> BTreeSet<u32> {
        let free = self.rows.iter().filter(|(entry, row)| {
            row.pins == 0 && class_of(row.container) == class && **entry >= protected_below
        });
        free.map(|(entry, _)| *entry).collect()
    }

    fn insert(&mut self, entry: u32) {
        let tag = tag(self.random.below(PATHS), self.random.below(LENGTH));
        let container = self.random.small(CONTAINERS);
        self.insert_row(entry, container, tag);
    }

    fn insert_row(&mut self, entry: u32, container: u32, tag: Tag) {
        let row = Row {
            container,
            tag,
            pins: 0,
        };
        self.rows.insert(entry, row);
        let placement = Placement {
            class: class_of(container),
            container: ContainerId(container),
        };
        self.policy.insert(EntryId(entry), tag, placement);
    }

    /// A request goes along a conversation; what is not there is stored where handles are free.
    fn request(&mut self) {
        self.milliseconds += self.random.below(100_000);
        self.policy.set_time(self.milliseconds);
        let (path, length) = (self.random.below(PATHS), 1 + self.random.below(LENGTH));
        let tags: Vec<Tag> = (0..length).map(|position| tag(path, position)).collect();
        let resident: Vec<EntryId> = self.resident(&tags);
        self.requests += 1;
        let id = RequestId(self.requests);
        let arrival = Arrival {
            id,
            class: Class(0),
            tags: &tags,
            context: Context {
                prompt_tokens: (path > 3).then_some(u32::try_from(length * 16).unwrap()),
                new_tokens: None,
                hint: Hint::ToolUse,
            },
        };
        self.policy.observe(&arrival, &resident);
        let there: HashSet<Tag> = self.rows.values().map(|row| row.tag).collect();
        let missing: Vec<Tag> = tags
            .iter()
            .filter(|tag| !there.contains(tag))
            .copied()
            .collect();
        self.policy.missed(&missing);
        let unused: Vec<u32> = (0..HANDLES)
            .filter(|entry| !self.rows.contains_key(entry))
            .collect();
        for (tag, entry) in missing.iter().rev().zip(unused) {
            self.insert_row(entry, u32::try_from(self.requests % 4).unwrap(), *tag);
        }
        let resident = self.resident(&tags);
        self.policy.finish(id, Some(100), &resident);
    }

    fn resident(&self, tags: &[Tag]) -> Vec<EntryId> {
        let own = self.rows.iter();
        let own = own.filter(|(_, row)| class_of(row.container) == Class(0));
        let by_tag: HashMap<Tag, u32> = own.map(|(entry, row)| (row.tag, *entry)).collect();
        let found = tags.iter().filter_map(|tag| by_tag.get(tag));
        found.map(|entry| EntryId(*entry)).collect()
    }

    fn evict(&mut self) {
        let class = Class(u16::try_from(self.random.below(3)).unwrap());
        let need = usize::try_from(self.random.below(40)).unwrap();
        let protected_below = if self.random.below(3) == 0 {
            self.random.small(HANDLES)
        } else {
            0
        };
        let free = self.free(class, protected_below);
        let protected = |entry: EntryId| entry.0 < protected_below;
        let named = self.policy.next_victims(need, class, &protected);
        assert_eq!(
            named.is_some(),
            free.len() >= need,
            "evict-n: {need} of {free:?}"
        );
        let mut victims = Vec::new();
        let done = self.policy.evict(need, class, &protected, &mut victims);
        assert_eq!(done, free.len() >= need);
        assert_eq!(victims.len(), if done { need } else { 0 });
        let different: BTreeSet<u32> = victims.iter().map(|entry| entry.0).collect();
        assert_eq!(different.len(), victims.len(), "no entry goes twice");
        assert!(different.is_subset(&free), "{different:?} of {free:?}");
        self.rows.retain(|entry, _| !different.contains(entry));
    }

    fn remove_container(&mut self) {
        let container = self.random.small(CONTAINERS);
        let own = || {
            self.rows
                .iter()
                .filter(|(_, row)| row.container == container)
        };
        let pinned = own().any(|(_, row)| row.pins > 0);
        let expected: Vec<EntryId> = own().map(|(entry, _)| EntryId(*entry)).collect();
        let mut victims = Vec::new();
        let done = self
            .policy
            .remove_container(ContainerId(container), &mut victims);
        assert_eq!(done, !pinned || expected.is_empty());
        if done {
            assert_eq!(victims, expected);
            self.rows.retain(|_, row| row.container != container);
        }
        let offered = self.policy.coldest_container(class_of(container));
        if let Some((id, _)) = offered {
            let all = self.rows.values().filter(|row| row.container == id.0);
            let pins: Vec<u32> = all.map(|row| row.pins).collect();
            assert!(!pins.is_empty() && pins.iter().all(|pins| *pins == 0));
        }
    }
}

fn run(steps: u32) {
    for (seed, name) in (1..).zip(POLICIES) {
        let mut checked = Checked::new(create(name).unwrap(), seed);
        checked.policy.set_capacity(200);
        for _ in 0..steps {
            checked.step();
        }
        assert!(
            checked.requests > u64::from(steps / 8),
            "{name} saw requests"
        );
    }
}

#[test]
fn every_policy_evicts_exactly_what_may_go_over_thousands_of_steps() {
    run(5_000);
}

#[test]
#[ignore = "a million steps of each policy"]
fn every_policy_evicts_exactly_what_may_go_over_a_million_steps() {
    run(1_000_000);
}

#[test]
fn the_directory_of_th_stays_within_its_size_whatever_comes() {
    let mut checked = Checked::new(Box::new(Th::with_directory(Some(100))), 99);
    let mut th = Th::with_directory(Some(100));
    for number in 0..2_000_u64 {
        checked.step();
        th.set_time(number * 500);
        let tags: Vec<Tag> = (0..30)
            .map(|at| Tag(Random(number * 30 + at).below(u64::MAX)))
            .collect();
        let arrival = Arrival {
            id: RequestId(number),
            class: Class(0),
            tags: &tags,
            context: Context::default(),
        };
        th.observe(&arrival, &[]);
        assert!(th.directory_len() <= 100, "{}", th.directory_len());
    }
}

/// Prompts of `keys` new keys, one each so many milliseconds: how many keys the directory knows in
/// the end.
fn known_after(seconds: u64, keys: u64, step: u64, directory: Option<usize>) -> usize {
    let mut th = Th::with_directory(directory);
    for number in 0..seconds * 1000 / step {
        th.set_time(number * step);
        let tags: Vec<Tag> = (0..keys)
            .map(|at| Tag(Random(number * keys + at).below(u64::MAX)))
            .collect();
        let arrival = Arrival {
            id: RequestId(number),
            class: Class(0),
            tags: &tags,
            context: Context::default(),
        };
        th.observe(&arrival, &[]);
    }
    th.directory_len()
}

#[test]
fn the_directory_of_th_forgets_what_was_not_used_for_an_hour() {
    // Up to 65,536 keys nothing is forgotten: those of 8,192 seconds.
    assert_eq!(known_after(8_000, 8, 1_000, None), 64_000);
    assert_eq!(known_after(12_000, 8, 1_000, None), 65_536);
    // A number of keys that is given holds whatever their age.
    assert_eq!(known_after(12_000, 8, 1_000, Some(90_000)), 90_000);
}

#[test]
fn the_directory_of_th_knows_the_last_hour_however_much_came_in_it() {
    // 900,000 keys an hour, for two hours. Ages are looked at now and then.
    let known = known_after(7_200, 100, 400, None);
    assert!((900_000..920_000).contains(&known), "{known}");
}
