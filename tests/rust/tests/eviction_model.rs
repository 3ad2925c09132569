//! LRU against a model that keeps everything in one ordered map and searches it.

use std::collections::BTreeMap;

use kvstrata_core::eviction::request::Tag;
use kvstrata_core::eviction::{Class, ContainerId, EntryId, EvictionPolicy, Placement, create};
use proptest::prelude::*;

const HANDLES: u32 = 24;
const CONTAINERS: u32 = 5;

#[derive(Clone, Debug)]
enum Step {
    Insert(u32, u32),
    Access(u32),
    Remove(u32),
    Pin(u32),
    Unpin(u32),
    Evict {
        class: u16,
        need: usize,
        protected_below: u32,
    },
    RemoveContainer(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let handle = 0..HANDLES;
    prop_oneof![
        6 => (handle.clone(), 0..CONTAINERS).prop_map(|(entry, file)| Step::Insert(entry, file)),
        4 => handle.clone().prop_map(Step::Access),
        2 => handle.clone().prop_map(Step::Remove),
        5 => handle.clone().prop_map(Step::Pin),
        6 => handle.clone().prop_map(Step::Unpin),
        5 => (0..3_u16, 0..6_usize, prop_oneof![3 => Just(0), 1 => handle])
            .prop_map(|(class, need, protected_below)| Step::Evict { class, need, protected_below }),
        1 => (0..CONTAINERS).prop_map(Step::RemoveContainer),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Row {
    tick: u64,
    container: u32,
    pins: u32,
}

#[derive(Debug, Default)]
struct Model {
    rows: BTreeMap<u32, Row>,
    container_access: BTreeMap<u32, u64>,
    tick: u64,
}

fn class_of(container: u32) -> Class {
    Class(u16::from(container >= 3))
}

impl Model {
    fn touch(&mut self, entry: u32) {
        if let Some(row) = self.rows.get_mut(&entry) {
            self.tick += 1;
            row.tick = self.tick;
            self.container_access.insert(row.container, self.tick);
        }
    }

    fn by_age(&self, class: Class) -> Vec<(u64, u32)> {
        let mut rows: Vec<(u64, u32)> = self
            .rows
            .iter()
            .filter(|(_, row)| row.pins == 0 && class_of(row.container) == class)
            .map(|(entry, row)| (row.tick, *entry))
            .collect();
        rows.sort_unstable();
        rows
    }

    fn forget_empty_containers(&mut self) {
        let rows = &self.rows;
        self.container_access
            .retain(|container, _| rows.values().any(|row| row.container == *container));
    }

    fn evict(&mut self, need: usize, class: Class, protected_below: u32) -> Option<Vec<EntryId>> {
        let free = self
            .by_age(class)
            .into_iter()
            .filter(|(_, entry)| *entry >= protected_below);
        let victims: Vec<u32> = free.map(|(_, entry)| entry).take(need).collect();
        if victims.len() < need {
            return None;
        }
        self.rows.retain(|entry, _| !victims.contains(entry));
        Some(victims.into_iter().map(EntryId).collect())
    }

    fn coldest_container(&self, class: Class) -> Option<u32> {
        let unpinned = self.container_access.iter().filter(|(container, _)| {
            class_of(**container) == class
                && !self
                    .rows
                    .values()
                    .any(|row| row.container == **container && row.pins > 0)
        });
        unpinned
            .min_by_key(|(_, tick)| **tick)
            .map(|(container, _)| *container)
    }
}

fn apply(step: &Step, model: &mut Model, policy: &mut dyn EvictionPolicy) {
    match *step {
        Step::Insert(entry, container) => {
            model.rows.insert(
                entry,
                Row {
                    tick: 0,
                    container,
                    pins: 0,
                },
            );
            model.touch(entry);
            let placement = Placement {
                class: class_of(container),
                container: ContainerId(container),
            };
            policy.insert(EntryId(entry), Tag(u64::from(entry) << 32), placement);
        }
        Step::Access(entry) => {
            model.touch(entry);
            policy.access(EntryId(entry));
        }
        Step::Remove(entry) => {
            model.rows.remove(&entry);
            policy.remove(EntryId(entry));
        }
        Step::Pin(entry) => {
            model.rows.entry(entry).and_modify(|row| row.pins += 1);
            policy.pin(EntryId(entry));
        }
        Step::Unpin(entry) => {
            model
                .rows
                .entry(entry)
                .and_modify(|row| row.pins = row.pins.saturating_sub(1));
            policy.unpin(EntryId(entry));
        }
        Step::Evict {
            class,
            need,
            protected_below,
        } => {
            let expected = model.evict(need, Class(class), protected_below);
            let mut victims = Vec::new();
            let protected = |entry: EntryId| entry.0 < protected_below;
            let done = policy.evict(need, Class(class), &protected, &mut victims);
            assert_eq!(done, expected.is_some());
            assert_eq!(victims, expected.unwrap_or_default());
        }
        Step::RemoveContainer(container) => {
            let of_it = |row: &Row| row.container == container;
            let pinned = model.rows.values().any(|row| of_it(row) && row.pins > 0);
            let mut victims = Vec::new();
            assert_eq!(
                policy.remove_container(ContainerId(container), &mut victims),
                !pinned
            );
            if !pinned {
                let expected: Vec<EntryId> = model
                    .rows
                    .iter()
                    .filter(|(_, row)| of_it(row))
                    .map(|(entry, _)| EntryId(*entry))
                    .collect();
                assert_eq!(victims, expected);
                model.rows.retain(|_, row| !of_it(row));
            }
        }
    }
    model.forget_empty_containers();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// 64 cases of up to 1,000 steps: about 32,000 steps a run.
    #[test]
    fn lru_does_what_the_model_does(steps in prop::collection::vec(step(), 1..1_000)) {
        let mut model = Model::default();
        let mut policy = create("lru").unwrap();
        for step in steps {
            apply(&step, &mut model, &mut *policy);
            prop_assert_eq!(policy.len(), model.rows.len());
            for class in [Class(0), Class(1), Class(2)] {
                let ages = model.by_age(class);
                prop_assert_eq!(policy.evictable(class), ages.len());
                // The policy's ticks and the model's may differ; which entry is next may not.
                prop_assert_eq!(policy.coldest(class).is_some(), !ages.is_empty());
                let offered = policy.coldest_container(class).map(|(container, _)| container.0);
                prop_assert_eq!(offered, model.coldest_container(class));
            }
        }
    }
}
