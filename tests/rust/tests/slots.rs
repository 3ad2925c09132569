//! Slabs and their slots: nothing overlaps, nothing is lost, every count is exact.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;

use kvstrata_core::slots::{Geometry, SizeClass, SlabId, Slot, Slots};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Rows of one class only, in the whole arena: the part of its bytes that is payload.
fn payload(geometry: &Geometry, row_bytes: u64, group: usize) -> f64 {
    let class = geometry.class_of(group).unwrap();
    let bytes = geometry.rows(class) * row_bytes;
    f64::from(u32::try_from(bytes * 10_000 / geometry.arena_bytes()).unwrap()) / 10_000.0
}

#[test]
fn eight_equal_groups_share_every_slot() {
    let geometry = Geometry::new(16 * MIB, 64, &[MIB; 8]).unwrap();
    assert_eq!(geometry.classes(), 1);
    for group in 0..8 {
        assert_eq!(geometry.rows(geometry.class_of(group).unwrap()), 16);
    }
}

#[test]
fn rows_of_very_different_size_leave_no_bytes_between_them() {
    let sizes = [MIB, 64 * KIB];
    let geometry = Geometry::new(710 * MIB, 64, &sizes).unwrap();
    assert_eq!(geometry.slab_bytes(), MIB);
    assert_eq!(geometry.rows(SizeClass(0)), 710);
    assert_eq!(geometry.rows(SizeClass(1)), 710 * 16);
}

#[test]
fn a_slab_is_long_enough_for_rows_that_do_not_divide_each_other() {
    for page in [64 * KIB, 96 * KIB, 17 * KIB] {
        for blocks in [1, 3] {
            let sizes = [10 * page * blocks, 4 * page * blocks];
            let geometry = Geometry::new(GIB, 64, &sizes).unwrap();
            for (group, bytes) in sizes.iter().enumerate() {
                let part = payload(&geometry, *bytes, group);
                assert!(part >= 0.98, "{part} of {geometry:?}");
            }
        }
    }
}

const GIB: u64 = 1 << 30;

#[test]
fn a_large_arena_has_a_bounded_number_of_slabs() {
    for sizes in [vec![64 * KIB], vec![64 * KIB, 4 * KIB], vec![100, 200, 300]] {
        let geometry = Geometry::new(400 * GIB, 64, &sizes).unwrap();
        assert!(geometry.slabs() <= 4096, "{geometry:?}");
    }
}

#[test]
fn an_arena_of_one_row_of_each_size_holds_one_row_of_each_size() {
    let mut slots = Slots::new(14 * KIB, 64, &[10 * KIB, 4 * KIB]).unwrap();
    let small = slots.take(SizeClass(1), 1).unwrap();
    let large = slots.take(SizeClass(0), 2).unwrap();
    assert_eq!(slots.offset(small), Some(10 * KIB));
    assert_eq!(slots.offset(large), Some(0));
    assert_eq!(slots.take(SizeClass(0), 3), None);
    assert_eq!(slots.take(SizeClass(1), 3), None);
}

#[test]
fn what_cannot_be_cut_is_refused_with_the_numbers() {
    let refused =
        |arena, align, sizes: &[u64]| Geometry::new(arena, align, sizes).unwrap_err().to_string();
    assert_eq!(
        refused(100, 64, &[200]),
        "100 bytes hold no row of 256 bytes"
    );
    assert_eq!(
        refused(100, 48, &[20]),
        "a slot alignment of 48 bytes is not a power of two"
    );
    assert_eq!(refused(100, 64, &[]), "slots without a row size");
    assert_eq!(refused(100, 64, &[0]), "a row of 0 bytes is no row");
}

#[test]
fn a_slot_given_back_twice_is_given_back_once() {
    let mut slots = Slots::new(4 * KIB, 64, &[KIB]).unwrap();
    let first = slots.take(SizeClass(0), 1).unwrap();
    slots.take(SizeClass(0), 2).unwrap();
    slots.release(first);
    slots.release(first);
    slots.release(Slot {
        slab: SlabId(99),
        row: 0,
    });
    assert_eq!((slots.taken(SizeClass(0)), slots.idle()), (1, 3));
}

#[derive(Clone, Debug)]
enum Step {
    Take(u16),
    Release(usize),
    ReleaseSlab(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4_u16).prop_map(Step::Take),
        3 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::ReleaseSlab),
    ]
}

/// Every slot that is taken, and whose it is.
#[derive(Debug, Default)]
struct Model {
    taken: BTreeMap<u64, (Slot, SizeClass, u32)>,
}

impl Model {
    fn of_slab(&self, slab: u32) -> Vec<(Slot, SizeClass, u32)> {
        let slots = self.taken.values();
        slots
            .filter(|(slot, ..)| slot.slab.0 == slab)
            .copied()
            .collect()
    }

    fn check(&self, slots: &Slots) {
        let geometry = slots.geometry();
        let mut end = 0;
        for (offset, (slot, class, _)) in &self.taken {
            let stride = geometry.stride(*class).unwrap();
            assert!(*offset >= end, "slots overlap at {offset}");
            assert_eq!(offset % geometry.align(), 0);
            assert_eq!(slots.offset(*slot), Some(*offset));
            end = offset + stride;
        }
        assert!(end <= geometry.arena_bytes());
        let mut free = vec![0; geometry.classes()];
        let mut taken = vec![0; geometry.classes()];
        let (mut idle, mut tail_idle) = (0, false);
        for slab in 0..=geometry.slabs() {
            let tail = slab == geometry.slabs();
            if tail && geometry.tail_bytes() == 0 {
                continue;
            }
            let held = self.of_slab(slab);
            let mut owners: Vec<u32> = held.iter().map(|(_, _, owner)| *owner).collect();
            let mut said: Vec<u32> = slots.owners(SlabId(slab)).collect();
            owners.sort_unstable();
            said.sort_unstable();
            assert_eq!(said, owners);
            match held.first() {
                None if tail => tail_idle = true,
                None => idle += 1,
                Some((_, class, _)) => {
                    assert!(held.iter().all(|(_, other, _)| other == class));
                    let used = u64::try_from(held.len()).unwrap();
                    free[usize::from(class.0)] += u64::from(geometry.rows_in(tail, *class)) - used;
                    taken[usize::from(class.0)] += used;
                }
            }
        }
        assert_eq!((slots.idle(), slots.tail_is_idle()), (idle, tail_idle));
        for number in 0..geometry.classes() {
            let class = SizeClass::at(number).unwrap();
            assert_eq!(slots.free(class), free[number]);
            assert_eq!(slots.taken(class), taken[number]);
        }
    }

    fn can_take(&self, slots: &Slots, class: SizeClass) -> bool {
        let geometry = slots.geometry();
        (0..=geometry.slabs()).any(|slab| {
            let tail = slab == geometry.slabs();
            let held = self.of_slab(slab);
            let room = usize::try_from(geometry.rows_in(tail, class)).unwrap();
            held.first().is_none_or(|(_, other, _)| *other == class) && held.len() < room
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn slots_never_overlap_and_every_count_is_exact(
        arena in 1_u64..40_000,
        align_bits in 0..8_u32,
        sizes in prop::collection::vec(1_u64..3_000, 1..5),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let Ok(mut slots) = Slots::new(arena, 1 << align_bits, &sizes) else {
            return Ok(());
        };
        let classes = u16::try_from(slots.geometry().classes()).unwrap();
        let mut model = Model::default();
        for (owner, step) in (0..).zip(steps) {
            match step {
                Step::Take(class) => {
                    let class = SizeClass(class % classes);
                    let possible = model.can_take(&slots, class);
                    match slots.take(class, owner) {
                        Some(slot) => {
                            let offset = slots.offset(slot).unwrap();
                            prop_assert!(model.taken.insert(offset, (slot, class, owner)).is_none());
                        }
                        None => prop_assert!(!possible),
                    }
                }
                Step::Release(at) => {
                    let held: Vec<u64> = model.taken.keys().copied().collect();
                    if !held.is_empty() {
                        let (slot, ..) = model.taken.remove(&held[at % held.len()]).unwrap();
                        slots.release(slot);
                        prop_assert_eq!(slots.offset(slot), None);
                    }
                }
                Step::ReleaseSlab(at) => {
                    let slab = u32::try_from(at % 64).unwrap();
                    for (slot, ..) in model.of_slab(slab) {
                        slots.release(slot);
                    }
                    model.taken.retain(|_, (slot, ..)| slot.slab.0 != slab);
                }
            }
            model.check(&slots);
        }
    }

    #[test]
    fn the_slabs_and_the_tail_are_the_arena(
        arena in 1_u64..(1 << 40),
        sizes in prop::collection::vec(1_u64..(64 << 20), 1..9),
    ) {
        if let Ok(geometry) = Geometry::new(arena, 64, &sizes) {
            let whole = u64::from(geometry.slabs()) * geometry.slab_bytes();
            prop_assert_eq!(whole + geometry.tail_bytes(), arena);
            prop_assert!(geometry.tail_bytes() < geometry.slab_bytes());
            prop_assert_eq!(geometry.slab_bytes() % 64, 0);
            for (group, bytes) in sizes.iter().enumerate() {
                let class = geometry.class_of(group).unwrap();
                prop_assert!(geometry.rows_in(false, class) > 0);
                let stride = geometry.stride(class).unwrap();
                prop_assert!(stride >= *bytes && stride < bytes + 64);
            }
        } else {
            prop_assert!(sizes.iter().any(|bytes| bytes.next_multiple_of(64) > arena));
        }
    }
}
