//! What the engine's threads and its callers share.

use core::fmt;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::process::Pid;

use super::Heir;
use super::errands::{Errands, Looked};
use super::ring::Wake;
use crate::io::Operation;
use crate::io::alter::Alter;
use crate::io::file::FileCache;
use crate::io::intake::Intake;
use crate::io::settle::Settler;
use crate::io::work::Mode;
use crate::sys::sync::Arc;
use crate::sys::sync::atomic::AtomicI32;

/// What the ring's thread is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Asleep {
    #[default]
    No,
    /// It has nothing to do.
    UntilWork,
    /// It can start nothing before something returns.
    Full,
}

/// The ring's part of what the intake's lock protects.
#[derive(Debug, Default)]
pub(super) struct RingState {
    /// What is past its deadline at this time is to be cancelled.
    pub(super) overdue: Option<Instant>,
    /// To be kept open by the ring.
    pub(super) guards: Vec<OwnedFd>,
    /// Errands that were done.
    pub(super) looked: VecDeque<Looked>,
    pub(super) asleep: Asleep,
}

pub(super) struct Shared {
    pub(super) intake: Arc<Intake<RingState>>,
    pub(super) wake: Arc<Wake>,
    pub(super) files: Arc<FileCache>,
    pub(super) errands: Errands,
    pub(super) settler: Settler,
    pub(super) mode: Mode,
    /// Most operations of one file under way.
    pub(super) depth: usize,
    /// Most files that the kernel has calls on.
    pub(super) files_max: usize,
    /// Whether no call on a file may be made by the ring's thread.
    pub(super) may_hang: bool,
    pub(super) alter: Option<Alter>,
    pub(super) heir: Option<Heir>,
    /// The ring's descriptor, -1 while there is none.
    pub(super) ring: AtomicI32,
    /// The process that has the threads.
    pub(super) process: Pid,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("intake", &self.intake)
            .field("mode", &self.mode)
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Most operations under way.
    pub(super) const fn depth_in_all(&self) -> usize {
        self.depth.saturating_add(self.depth.div_ceil(4))
    }

    /// The next operation to start, for the ring's thread.
    pub(super) fn next_operation(&self) -> Option<Operation> {
        let mut state = self.intake.lock();
        if state.closing || self.intake.poisoned() {
            return None;
        }
        state.queue.start()
    }

    /// Hands the ring's thread what a file was found to be.
    pub(super) fn looked(&self, looked: Looked) {
        let mut state = self.intake.lock();
        state.own.looked.push_back(looked);
        let wakes = core::mem::take(&mut state.own.asleep) != Asleep::No;
        drop(state);
        if wakes {
            self.wake.signal();
        }
    }

    /// Wakes the ring's thread from this sleep.
    pub(super) fn rouse_from(&self, sleep: Asleep) {
        let mut state = self.intake.lock();
        let wakes = state.own.asleep == sleep;
        if wakes {
            state.own.asleep = Asleep::No;
        }
        drop(state);
        if wakes {
            self.wake.signal();
        }
    }
}
