//! What the writer thread does beside stores: looks at the limits, writes access times.

use std::time::Instant;

use core::time::Duration;

use crate::io::Direction;
use crate::tier::disk::DiskTier;
use crate::tier::state::State;

/// Time to the first look at the limits after the first work on a tier that had no files.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// A chore that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chore {
    /// Look whether the limits of space are kept.
    KeepLimits,
    /// Write a slice of access times.
    WriteTouched,
}

/// What is due when. A tier without files has no chores, and its writer sleeps until it is told.
#[derive(Debug)]
pub(super) struct Chores {
    look: Option<Instant>,
    /// Whether the last work was a slice of access times: then stores come first.
    wrote: bool,
}

impl Chores {
    /// Looks at the limits at once: what lies in the root was left by earlier runs.
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            look: Some(now),
            wrote: false,
        }
    }

    /// The chore that is due, which a store that waits may follow but not wait for long.
    pub(super) fn take_due(&mut self, tier: &DiskTier, state: &State) -> Option<Chore> {
        if tier.health.refuses(Direction::Write) {
            return None;
        }
        let clock = &tier.around.clock;
        if self.look.is_some_and(|at| at <= clock.now()) {
            self.look = None;
            return Some(Chore::KeepLimits);
        }
        let store_waits = !state.queued.is_empty();
        let due = state.inventory.touched.is_due(clock.unix_seconds());
        self.wrote = due && !(self.wrote && store_waits);
        self.wrote.then_some(Chore::WriteTouched)
    }

    /// Does a chore.
    pub(super) fn run(&mut self, tier: &DiskTier, chore: Chore) {
        match chore {
            Chore::KeepLimits => self.look_after(tier, tier.keep_limits()),
            Chore::WriteTouched => tier.write_touched(),
        }
    }

    /// A store was planned: there may be files from now on.
    pub(super) fn planned(&mut self, tier: &DiskTier) {
        if self.look.is_none() {
            self.look_after(tier, Some(FIRST_LOOK));
        }
    }

    fn look_after(&mut self, tier: &DiskTier, pause: Option<Duration>) {
        let now = tier.around.clock.now();
        self.look = pause.map(|pause| now.checked_add(pause).unwrap_or(now));
    }

    /// How long the writer may sleep; `None`: until it is told, as it is when a device that was
    /// given up is well again.
    pub(super) fn sleep(&self, tier: &DiskTier) -> Option<Duration> {
        if tier.health.refuses(Direction::Write) {
            return None;
        }
        let now = tier.around.clock.now();
        self.look.map(|at| at.saturating_duration_since(now))
    }
}
