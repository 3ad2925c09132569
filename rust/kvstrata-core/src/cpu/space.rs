//! Making room: what goes is planned first, so that a store that does not fit changes nothing.

use super::{CpuTier, User};
use crate::eviction::request::Tag;
use crate::eviction::{Class, ContainerId, EntryId};
use crate::key::Key;
use crate::slots::{SizeClass, SlabId};

/// What one class takes.
#[derive(Debug, Default)]
struct Step {
    /// Rows of its own that go.
    own: usize,
    /// Slabs of other classes that it takes, with all their rows.
    slabs: Vec<SlabId>,
}

/// What is planned so far, and what it leaves.
#[derive(Debug)]
pub(super) struct Plan {
    steps: Vec<Step>,
    /// Rows that each class can still give.
    left: Vec<usize>,
    /// Rows that a class will need of its own when its turn comes.
    reserved: Vec<usize>,
    /// Empty slabs, and whether the tail is one.
    idle: u64,
    tail_idle: bool,
}

impl Plan {
    fn step(&mut self, class: usize) -> Option<&mut Step> {
        self.steps.get_mut(class)
    }

    fn is_taken(&self, slab: SlabId) -> bool {
        self.steps.iter().any(|step| step.slabs.contains(&slab))
    }
}

impl CpuTier {
    /// Empties the slabs that go to other classes.
    pub(super) fn take_slabs(&mut self, plan: &Plan, evicted: &mut Vec<Key>) {
        let slabs = plan.steps.iter().flat_map(|step| &step.slabs);
        for slab in slabs {
            let owners: Vec<EntryId> = self.slots.owners(*slab).map(EntryId).collect();
            for id in &owners {
                self.policy.remove(*id);
            }
            self.gone(&owners, evicted);
            self.counters.moved_slabs += 1;
        }
    }

    /// Evicts the rows that a class gives for itself. Where the policy knows whose rows come, of which
    /// `head` is the first, it may spare those that are worth more; returns how many.
    pub(super) fn evict_own(
        &mut self,
        plan: &Plan,
        at: usize,
        head: Option<Tag>,
        evicted: &mut Vec<Key>,
    ) -> usize {
        let own = plan.steps.get(at).map_or(0, |step| step.own);
        let Some(class) = SizeClass::at(at).filter(|_| own > 0) else {
            return 0;
        };
        let mut victims = Vec::with_capacity(own);
        let (class, none) = (Class(class.0), |_: EntryId| false);
        match head {
            Some(head) => self.policy.evict_for(head, own, class, &none, &mut victims),
            None => usize::from(self.policy.evict(own, class, &none, &mut victims)),
        };
        let spared = head.map_or(0, |_| own.saturating_sub(victims.len()));
        self.gone(&victims, evicted);
        spared
    }

    /// Gives the slots of rows back that the policy knows no more.
    fn gone(&mut self, victims: &[EntryId], evicted: &mut Vec<Key>) {
        for id in victims {
            if let Some(entry) = self.entries.get(*id) {
                evicted.push(entry.key);
            }
            self.unlist(*id);
            self.free_if_unused(*id);
        }
        self.counters.evicted_rows += u64::try_from(victims.len()).unwrap_or(0);
    }

    /// A plan for the rows of `user`. A worker's may take the room of rows that waiting requests need,
    /// where that and no other makes it fit: these are given up, of those that came last.
    pub(super) fn plan_for(&mut self, needs: &[u64], user: User) -> Option<Plan> {
        let plan = self.plan(needs);
        if plan.is_some() || user == User::Tier || !self.fits_without_awaited(needs) {
            return plan;
        }
        while self.give_up_last() {
            let plan = self.plan(needs);
            if plan.is_some() {
                return plan;
            }
        }
        None
    }

    /// Whether so many new rows would fit if no waiting request kept any. Changes nothing.
    fn fits_without_awaited(&mut self, needs: &[u64]) -> bool {
        if self.awaited.is_empty() || !self.may_fit(needs) {
            return false;
        }
        let pinned = self.awaited_rows();
        for id in &pinned {
            self.policy.unpin(*id);
        }
        let fits = self.plan(needs).is_some();
        for id in &pinned {
            self.policy.pin(*id);
        }
        fits
    }

    /// `false` where all that is free, may go or is awaited is less than what is needed.
    fn may_fit(&self, needs: &[u64]) -> bool {
        let geometry = self.slots.geometry();
        let mut room = self.awaited.bytes + u64::from(self.slots.idle()) * geometry.slab_bytes();
        if self.slots.tail_is_idle() {
            room += geometry.tail_bytes();
        }
        let mut needed = 0;
        for (at, need) in needs.iter().enumerate() {
            let Some(class) = SizeClass::at(at) else {
                continue;
            };
            let evictable = self.policy.evictable(Class(class.0));
            let own = self.slots.free(class) + u64::try_from(evictable).unwrap_or(u64::MAX);
            let stride = geometry.stride(class).unwrap_or(0);
            room = room.saturating_add(own.saturating_mul(stride));
            needed += need * stride;
        }
        needed <= room
    }

    /// What has to go for so many new rows of each class; `None` where that is not enough. Larger
    /// rows come first, because fewer slabs can hold them.
    fn plan(&mut self, needs: &[u64]) -> Option<Plan> {
        let classes = needs.len();
        let mut plan = Plan {
            steps: (0..classes).map(|_| Step::default()).collect(),
            left: Vec::with_capacity(classes),
            reserved: Vec::with_capacity(classes),
            idle: u64::from(self.slots.idle()),
            tail_idle: self.slots.tail_is_idle(),
        };
        for (at, need) in needs.iter().enumerate() {
            let class = SizeClass::at(at)?;
            plan.left.push(self.policy.evictable(Class(class.0)));
            let own = need.saturating_sub(self.slots.free(class));
            plan.reserved.push(usize::try_from(own).ok()?);
        }
        for at in 0..classes {
            self.plan_class(&mut plan, needs, at)?;
        }
        Some(plan)
    }

    fn plan_class(&mut self, plan: &mut Plan, needs: &[u64], at: usize) -> Option<()> {
        let class = SizeClass::at(at)?;
        let mut need = needs.get(at)?.saturating_sub(self.slots.free(class));
        *plan.reserved.get_mut(at)? = 0;
        let geometry = self.slots.geometry();
        let tail_rows = u64::from(geometry.rows_in(true, class));
        let rows = u64::from(geometry.rows_in(false, class)).max(1);
        if need > 0 && plan.tail_idle && tail_rows > 0 {
            plan.tail_idle = false;
            need = need.saturating_sub(tail_rows);
        }
        let empty = need.div_ceil(rows).min(plan.idle);
        plan.idle -= empty;
        need = need.saturating_sub(empty * rows);
        while need > 0 {
            let left = *plan.left.get(at)?;
            let own_age = if left == 0 {
                None
            } else {
                self.policy.coldest(Class(class.0))
            };
            let slab = self.coldest_slab(plan, needs, class);
            match (own_age, slab) {
                (Some(own), Some((slab, age))) if age < own => {
                    need = need.saturating_sub(self.take_slab(plan, at, slab)?);
                }
                (Some(_), _) => {
                    let own = usize::try_from(need).ok()?.min(left);
                    plan.step(at)?.own += own;
                    *plan.left.get_mut(at)? -= own;
                    need -= u64::try_from(own).ok()?;
                }
                (None, Some((slab, _))) => {
                    need = need.saturating_sub(self.take_slab(plan, at, slab)?);
                }
                (None, None) => return None,
            }
        }
        Some(())
    }

    /// Plans to take a slab; how many rows of the class fit there.
    fn take_slab(&self, plan: &mut Plan, at: usize, slab: SlabId) -> Option<u64> {
        let donor = usize::from(self.slots.class_of(slab)?.0);
        let rows = usize::try_from(self.slots.used(slab)).ok()?;
        let left = plan.left.get_mut(donor)?;
        *left = left.saturating_sub(rows);
        plan.step(at)?.slabs.push(slab);
        Some(u64::from(self.slots.rows_of(slab, SizeClass::at(at)?)))
    }

    /// The slab of another class that was used longest ago and that `class` may take, and when.
    fn coldest_slab(&self, plan: &Plan, needs: &[u64], class: SizeClass) -> Option<(SlabId, u64)> {
        (0..needs.len())
            .filter_map(SizeClass::at)
            .filter(|donor| *donor != class)
            .filter_map(|donor| self.coldest_slab_of(plan, needs, donor, class))
            .min_by_key(|(_, age)| *age)
    }

    fn coldest_slab_of(
        &self,
        plan: &Plan,
        needs: &[u64],
        donor: SizeClass,
        class: SizeClass,
    ) -> Option<(SlabId, u64)> {
        let at = usize::from(donor.0);
        let left = *plan.left.get(at)?;
        let needed = *needs.get(at)? > 0;
        let kept = *plan.reserved.get(at)?;
        let mut most = 8;
        loop {
            let coldest = self.policy.coldest_containers(Class(donor.0), most);
            let found = coldest.iter().find(|(ContainerId(number), _)| {
                let slab = SlabId(*number);
                let used = self.slots.used(slab);
                let is_full = used == self.slots.rows_of(slab, donor);
                self.slots.rows_of(slab, class) > 0
                    && (!needed || is_full)
                    && usize::try_from(used).is_ok_and(|used| used + kept <= left)
                    && !plan.is_taken(slab)
                    && self.all_idle(slab)
            });
            if let Some((ContainerId(number), age)) = found {
                return Some((SlabId(*number), *age));
            }
            if coldest.len() < most {
                return None;
            }
            most *= 2;
        }
    }

    /// Whether all rows of a slab may go. Rows that a reset left in use are none of the policy's.
    fn all_idle(&self, slab: SlabId) -> bool {
        self.slots.owners(slab).all(|owner| {
            self.entries
                .get(EntryId(owner))
                .is_some_and(super::Entry::is_idle)
        })
    }
}
