//! The CPU tier against a model that keeps plain maps: what is found, who uses what, and that no
//! slot is ever given to two.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};

use kvstrata_core::cpu::{CpuOptions, CpuTier, Handle, Place, Presence, User};
use kvstrata_core::key::{GroupId, Key};
use proptest::prelude::*;
use serde_json::Value;

const KEYS: u8 = 24;
const GROUPS: u32 = 3;

#[derive(Clone, Debug)]
enum Step {
    Store(Vec<(u8, u32)>),
    Promote(Vec<(u8, u32)>),
    Stored(Vec<(u8, u32)>, bool),
    Load(Vec<(u8, u32)>),
    Loaded(usize),
    Hold(Vec<(u8, u32)>),
    LetGo(usize, bool),
    Abandon(usize),
    Forget(Vec<(u8, u32)>),
    Reset,
    Flushed,
}

fn step() -> impl Strategy<Value = Step> {
    let some = || prop::collection::vec((0..KEYS, 0..GROUPS), 1..6);
    prop_oneof![
        8 => some().prop_map(Step::Store),
        4 => some().prop_map(Step::Promote),
        8 => (some(), prop::bool::weighted(0.8)).prop_map(|(keys, ok)| Step::Stored(keys, ok)),
        5 => some().prop_map(Step::Load),
        5 => any::<usize>().prop_map(Step::Loaded),
        3 => some().prop_map(Step::Hold),
        6 => (any::<usize>(), any::<bool>()).prop_map(|(at, ok)| Step::LetGo(at, ok)),
        1 => any::<usize>().prop_map(Step::Abandon),
        2 => some().prop_map(Step::Forget),
        1 => Just(Step::Reset),
        2 => Just(Step::Flushed),
    ]
}

fn key(number: u8, group: u32) -> Key {
    let mut bytes = vec![number; 32];
    bytes.extend(group.to_be_bytes());
    Key::new(&bytes).unwrap()
}

fn named(keys: &[(u8, u32)]) -> Vec<Key> {
    keys.iter()
        .map(|(number, group)| key(*number, *group))
        .collect()
}

#[derive(Clone, Debug)]
struct Row {
    place: Place,
    bytes: u64,
    writing: bool,
    worker: u32,
    tier: u32,
}

#[derive(Debug, Default)]
struct Model {
    /// By key bytes.
    listed: BTreeMap<Vec<u8>, Row>,
    /// Not found any more, and still used.
    orphans: Vec<Row>,
    loads: Vec<Key>,
    holds: Vec<Handle>,
}

fn bytes_of(key: &Key) -> Vec<u8> {
    key.as_bytes().to_vec()
}

struct Run {
    tier: CpuTier,
    sizes: Vec<u64>,
    arena: u64,
    model: Model,
}

impl Run {
    fn presence(&self, key: &Key) -> Presence {
        match self.model.listed.get(&bytes_of(key)) {
            None => Presence::Absent,
            Some(row) if row.writing => Presence::Writing,
            Some(_) => Presence::Ready,
        }
    }

    fn size(&self, key: &Key) -> u64 {
        self.sizes[usize::try_from(key.group().0).unwrap()]
    }

    fn store(&mut self, keys: &[Key], user: User) {
        let before = self.tier.stats().get("rows").cloned();
        let mut seen = BTreeSet::new();
        let wanted: Vec<usize> = (0..keys.len())
            .filter(|at| {
                self.presence(&keys[*at]) == Presence::Absent && seen.insert(bytes_of(&keys[*at]))
            })
            .collect();
        let Some(prepared) = self.tier.prepare_store(keys, user).unwrap() else {
            assert_eq!(self.tier.stats().get("rows").cloned(), before);
            assert!(!wanted.is_empty(), "nothing to store always fits");
            return;
        };
        assert!(prepared.positions.is_sorted());
        assert!(prepared.positions.iter().all(|at| wanted.contains(at)));
        for gone in &prepared.evicted {
            let row = self
                .model
                .listed
                .remove(&bytes_of(gone))
                .expect("was there");
            assert!(!row.writing && row.worker == 0 && row.tier == 0, "{row:?}");
            assert!(!keys.contains(gone), "a key of the same store went");
        }
        for (at, place) in prepared.positions.iter().zip(&prepared.places) {
            let row = Row {
                place: *place,
                bytes: self.size(&keys[*at]),
                writing: true,
                worker: u32::from(user == User::Worker),
                tier: u32::from(user == User::Tier),
            };
            self.model.listed.insert(bytes_of(&keys[*at]), row);
            if user == User::Tier {
                self.model.holds.push(place.handle);
            }
        }
        if prepared.evicted.is_empty() {
            assert_eq!(prepared.positions, wanted);
        }
    }

    fn stored(&mut self, keys: &[Key], success: bool) {
        let mut expected = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            let name = bytes_of(key);
            let Some(row) = self.model.listed.get_mut(&name) else {
                continue;
            };
            if !row.writing || row.worker == 0 {
                continue;
            }
            if success {
                row.writing = false;
                row.worker = 0;
                expected.push(at);
            } else {
                self.model.listed.remove(&name);
            }
        }
        assert_eq!(self.tier.complete_store(keys, success), expected);
    }

    fn load(&mut self, keys: &[Key]) {
        let possible = keys.iter().all(|key| self.presence(key) == Presence::Ready);
        let places = self.tier.prepare_load(keys);
        assert_eq!(places.is_some(), possible);
        for (key, place) in keys.iter().zip(places.unwrap_or_default()) {
            let row = self.model.listed.get_mut(&bytes_of(key)).unwrap();
            assert_eq!(row.place, place);
            row.worker += 1;
            self.model.loads.push(*key);
        }
    }

    fn loaded(&mut self, at: usize) {
        if self.model.loads.is_empty() {
            return;
        }
        let key = self.model.loads.swap_remove(at % self.model.loads.len());
        self.model.listed.get_mut(&bytes_of(&key)).unwrap().worker -= 1;
        self.tier.complete_load(&[key]);
    }

    fn hold(&mut self, keys: &[Key]) {
        let held = self.tier.hold_ready(keys);
        for (key, place) in keys.iter().zip(held) {
            assert_eq!(place.is_some(), self.presence(key) == Presence::Ready);
            if let Some(place) = place {
                let row = self.model.listed.get_mut(&bytes_of(key)).unwrap();
                assert_eq!(row.place, place);
                row.tier += 1;
                self.model.holds.push(place.handle);
            }
        }
    }

    fn let_go(&mut self, at: usize, success: bool) {
        if self.model.holds.is_empty() {
            return;
        }
        let handle = self.model.holds.swap_remove(at % self.model.holds.len());
        self.tier.let_go(&[handle], success);
        let found = self
            .model
            .listed
            .iter_mut()
            .find(|(_, row)| row.place.handle == handle);
        if let Some((name, row)) = found {
            row.tier -= 1;
            if core::mem::replace(&mut row.writing, false) && !success {
                let name = name.clone();
                self.model.listed.remove(&name);
            }
            return;
        }
        let orphan = self
            .model
            .orphans
            .iter_mut()
            .find(|row| row.place.handle == handle);
        orphan.expect("a use of a row that is gone").tier -= 1;
    }

    fn abandon(&mut self, at: usize) {
        if self.model.holds.is_empty() {
            return;
        }
        let handle = self.model.holds[at % self.model.holds.len()];
        self.tier.abandon(&[handle]);
        let found = self
            .model
            .listed
            .iter()
            .find(|(_, row)| row.place.handle == handle);
        if let Some((name, row)) = found
            && row.writing
        {
            let (name, row) = (name.clone(), row.clone());
            self.model.listed.remove(&name);
            self.model.orphans.push(row);
        }
    }

    fn forget(&mut self, keys: &[Key]) {
        self.tier.forget(keys);
        for key in keys {
            let idle = |row: &Row| row.worker == 0 && row.tier == 0;
            if self.model.listed.get(&bytes_of(key)).is_some_and(idle) {
                self.model.listed.remove(&bytes_of(key));
            }
        }
    }

    fn reset(&mut self) {
        self.tier.reset();
        let all = core::mem::take(&mut self.model.listed);
        self.model.orphans.extend(all.into_values());
        self.model.loads.clear();
    }

    fn flushed(&mut self) {
        self.tier.flushed();
        for row in &mut self.model.orphans {
            row.worker = 0;
        }
    }

    fn check(&mut self) {
        self.model
            .orphans
            .retain(|row| row.worker > 0 || row.tier > 0);
        let all: Vec<Key> = (0..KEYS)
            .flat_map(|number| (0..GROUPS).map(move |group| key(number, group)))
            .collect();
        let expected: Vec<Presence> = all.iter().map(|key| self.presence(key)).collect();
        assert_eq!(self.tier.lookup(&all), expected);
        let mut places: Vec<(u64, u64)> = self
            .model
            .listed
            .values()
            .chain(&self.model.orphans)
            .map(|row| (row.place.offset, row.bytes))
            .collect();
        places.sort_unstable();
        let mut end = 0;
        for (offset, bytes) in &places {
            assert!(*offset >= end, "two rows share bytes at {offset}");
            assert_eq!(offset % 64, 0);
            end = offset + bytes;
        }
        assert!(end <= self.arena);
        let stats = self.tier.stats();
        let said = |field: &str| stats.get(field).and_then(Value::as_u64).unwrap();
        assert_eq!(
            said("rows"),
            u64::try_from(self.model.listed.len()).unwrap()
        );
        assert_eq!(
            said("orphaned_rows"),
            u64::try_from(self.model.orphans.len()).unwrap()
        );
        let all = || self.model.listed.values().chain(&self.model.orphans);
        let count = |wanted: fn(&Row) -> bool| {
            u64::try_from(all().filter(|row| wanted(row)).count()).unwrap()
        };
        assert_eq!(said("writing_rows"), count(|row| row.writing));
        assert_eq!(
            said("rows_in_use"),
            count(|row| row.worker > 0 || row.tier > 0)
        );
        assert_eq!(
            said("payload_bytes"),
            places.iter().map(|(_, bytes)| bytes).sum::<u64>()
        );
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Store(keys) => self.store(&named(&keys), User::Worker),
            Step::Promote(keys) => self.store(&named(&keys), User::Tier),
            Step::Stored(keys, success) => self.stored(&named(&keys), success),
            Step::Load(keys) => self.load(&named(&keys)),
            Step::Loaded(at) => self.loaded(at),
            Step::Hold(keys) => self.hold(&named(&keys)),
            Step::LetGo(at, success) => self.let_go(at, success),
            Step::Abandon(at) => self.abandon(at),
            Step::Forget(keys) => self.forget(&named(&keys)),
            Step::Reset => self.reset(),
            Step::Flushed => self.flushed(),
        }
        self.check();
    }

    /// Ends every use; then all but one row's worth of each size can be stored anew.
    fn wind_up(&mut self) {
        while !self.model.holds.is_empty() {
            self.let_go(0, true);
        }
        self.reset();
        self.flushed();
        self.check();
        assert!(self.model.orphans.is_empty());
        for group in 0..GROUPS {
            let whole = self.tier.slots().geometry();
            let class = whole.class_of(usize::try_from(group).unwrap()).unwrap();
            let rows = whole.rows(class).min(u64::from(KEYS));
            let keys: Vec<Key> = (0..u8::try_from(rows).unwrap())
                .map(|number| key(number, group))
                .collect();
            let prepared = self
                .tier
                .prepare_store(&keys, User::Worker)
                .unwrap()
                .unwrap();
            assert_eq!(prepared.positions.len(), keys.len());
            self.tier.reset();
            self.tier.flushed();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn the_tier_finds_keeps_and_gives_back_what_the_model_does(
        arena in 3_000_u64..16_000,
        sizes in prop::collection::vec(1_u64..3_000, 3..=3),
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let tier = CpuTier::new(CpuOptions {
            arena_bytes: arena,
            align: 64,
            row_bytes: (0..).map(GroupId).zip(sizes.iter().copied()).collect(),
            policy: "lru".to_owned(),
        ..CpuOptions::default()
        });
        // A row is a multiple of 64 bytes long, and may not fit.
        let Ok(tier) = tier else { return Ok(()) };
        let mut run = Run { tier, sizes, arena, model: Model::default() };
        for step in steps {
            run.step(step);
        }
        run.wind_up();
    }
}
