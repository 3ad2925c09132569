//! The disk tier: rows of one namespace in the row files of one root.
//!
//! Three kinds of threads meet at one lock ([`State`]). The caller's threads look up, plan loads
//! and queue stores; none of that touches a file. The engine's threads move bytes and hand each
//! operation back ([`DiskTier::complete`]). The writer thread makes space, plans stores and
//! writes the row table; the keeper thread gives up what is past its deadline.

use core::time::Duration;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::buffer::aligned::AlignedBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::Class;
use crate::format::superblock::{NamespaceDigest, WriterId};
use crate::index::Fingerprinter;
use crate::io::probe::Capabilities;
use crate::io::{Alignment, Completion, Direction, Engine};
use crate::job::{JobKind, Outcome};
use crate::key::{GroupId, Key};
use crate::metrics::count;
use crate::namespace::Lease;
use crate::namespace::epoch::Epochs;
use crate::notice::Level;
use crate::sys::fs::{Directory, File};
use crate::sys::sync::atomic::{AtomicBool, Ordering};
use crate::sys::sync::{Arc, Condvar, JoinHandle, Mutex, OnceLock, lock};
use crate::tier::arguments::check_arguments;
use crate::tier::health::Health;
use crate::tier::request::Item;
use crate::tier::space::Space;
use crate::tier::state::{Flight, State};
use crate::tier::stats::SpaceFigures;
use crate::tier::surroundings::Surroundings;

/// One open disk tier.
#[derive(Debug)]
pub(crate) struct DiskTier {
    pub(super) around: Surroundings,
    /// Class and payload bytes of each group.
    pub(super) groups: BTreeMap<GroupId, (Class, usize)>,
    pub(super) fingerprinter: Fingerprinter,
    pub(super) digest: NamespaceDigest,
    pub(super) writer: WriterId,
    pub(super) deadline: Duration,
    pub(super) honours_busy: bool,
    pub(super) capabilities: Capabilities,
    pub(super) engine: OnceLock<Arc<dyn Engine>>,
    pub(super) state: Mutex<State>,
    /// Wakes the writer thread.
    pub(super) work: Condvar,
    /// Wakes the keeper thread.
    pub(super) watch: Condvar,
    /// Tells that the writer thread is done.
    pub(super) done: Condvar,
    pub(super) space: Mutex<Space>,
    pub(super) space_figures: SpaceFigures,
    /// How the device has been doing.
    pub(super) health: Health,
    pub(super) root: Arc<Directory>,
    /// Name of the file that a trial writes.
    pub(super) trial_name: String,
    pub(super) epochs: Mutex<Epochs>,
    /// When the first request came that the policy was told the time of.
    pub(super) first_request: Mutex<Option<std::time::Instant>>,
    /// Where padding is read to.
    pub(super) scratch: Arc<AlignedBuffer>,
    /// Where padding is written from.
    pub(super) zeros: Arc<AlignedBuffer>,
    /// Order of this process's first store: older rows were there when it opened.
    pub(super) first_store_order: u64,
    /// Set after the writer thread panicked: nothing is stored any more.
    pub(super) poisoned: AtomicBool,
    /// Whether the log was told that the engine panicked.
    pub(super) panic_told: AtomicBool,
    /// Keeps the root ours until the tier is closed.
    pub(super) root_lock: Mutex<Option<File>>,
    /// Tells others that this writer is alive; ends before the root's lock does.
    pub(super) lease: Mutex<Option<Lease>>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
}

impl DiskTier {
    pub(super) fn engine(&self) -> Result<&Arc<dyn Engine>> {
        self.engine
            .get()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the tier has no I/O engine"))
    }

    /// Answers for each key whether a row is there: never waits for I/O.
    pub(crate) fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        let fingerprints: Vec<_> = keys.iter().map(|key| self.fingerprinter.of(key)).collect();
        let refused = self.refuses(Direction::Read);
        let serves = !refused && !self.is_engine_poisoned();
        let state = self.open_state()?;
        let found: Vec<bool> = fingerprints
            .iter()
            .map(|of| serves && state.readable() && state.inventory.index.find(*of).is_some())
            .collect();
        drop(state);
        let metrics = &self.around.metrics;
        if refused {
            metrics.circuit_missed_lookups.add(count(keys.len()));
        }
        metrics.lookups.add(count(keys.len()));
        metrics
            .lookup_hits
            .add(count(found.iter().filter(|hit| **hit).count()));
        Ok(found.into_iter().map(Some).collect())
    }

    /// Counts an access to each key that is there.
    pub(crate) fn touch(&self, keys: &[Key]) -> Result<()> {
        let fingerprints: Vec<_> = keys.iter().map(|key| self.fingerprinter.of(key)).collect();
        let now = self.around.clock.unix_seconds();
        let milliseconds = self.milliseconds();
        let mut state = self.open_state()?;
        let inventory = &mut state.inventory;
        inventory.policy.set_time(milliseconds);
        let entries: Vec<_> = fingerprints
            .iter()
            .filter_map(|of| inventory.index.find(*of))
            .collect();
        inventory.access(&entries, now);
        Ok(())
    }

    /// Hides keys at once; stores of them under way end as dropped.
    pub(crate) fn remove(&self, keys: &[Key]) -> Result<()> {
        let fingerprints: Vec<_> = keys.iter().map(|key| self.fingerprinter.of(key)).collect();
        let mut state = self.open_state()?;
        for fingerprint in fingerprints {
            state.remove(fingerprint);
        }
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// Begins a new epoch: nothing stored before is found any more, also after a restart.
    ///
    /// Returns false when the epoch could not be recorded; the tier then answers miss to
    /// everything and stores nothing until a later reset succeeds.
    pub(crate) fn reset(&self) -> Result<bool> {
        let mut epochs = lock(&self.epochs);
        let mut state = self.open_state()?;
        // Nothing of the old epoch is served from here on, whatever the disk says.
        state.reset_failed = true;
        let at_least = state.epoch;
        self.forget_everything(&mut state);
        drop(state);
        let advanced = epochs.advance(at_least);
        let mut state = lock(&self.state);
        let recorded = match advanced {
            Ok(epoch) => {
                state.epoch = epoch;
                state.reset_failed = false;
                true
            }
            Err(error) => {
                self.around.metrics.errors.add(1);
                self.around.notices.say(Level::Error, "reset", || {
                    format!("reset could not be recorded, the tier serves nothing: {error}")
                });
                false
            }
        };
        drop(state);
        self.work.notify_one();
        Ok(recorded)
    }

    /// Hides every row and cancels every store; loads under way will end as misses.
    fn forget_everything(&self, state: &mut State) {
        state.let_all_go();
        state.inventory.unlist_all();
        state
            .writing
            .values_mut()
            .for_each(|writing| writing.cancelled = true);
        let queued: Vec<_> = state.queued.drain(..).collect();
        for store in queued {
            self.settle_rest(state, &store.request, store.next, Outcome::Dropped, "reset");
        }
        // Flights compare their epoch with the state's; this one is never used for storing.
        state.epoch = state.epoch.saturating_add(1);
    }

    /// Checks a job's arguments and turns them into items.
    pub(super) fn items(&self, keys: &[Key], offsets: &[u64]) -> Result<Vec<Item>> {
        let slots = check_arguments(keys, offsets, self.around.arena.length(), |key| {
            self.groups
                .get(&key.group())
                .map(|(_, row_bytes)| *row_bytes)
        })?;
        Ok(Item::all(keys, slots, &self.fingerprinter))
    }

    /// The lock, while the tier takes calls.
    pub(super) fn open_state(&self) -> Result<crate::sys::sync::MutexGuard<'_, State>> {
        let state = lock(&self.state);
        state.phase.require_open()?;
        Ok(state)
    }

    /// Takes an operation back from the engine; called on the engine's threads.
    pub(super) fn complete(&self, completion: &Completion) {
        let id = completion.operation.id;
        let mut state = lock(&self.state);
        let Some(mut flight) = state.flights.remove(&id) else {
            drop(state);
            self.complete_trial(completion);
            return;
        };
        flight.landing = flight.request.kind == JobKind::Load && !flight.abandoned;
        state.landing = state.landing.saturating_add(usize::from(flight.landing));
        if flight.request.kind == JobKind::Store {
            let bytes = completion.operation.bytes();
            state.store_bytes_in_engine = state.store_bytes_in_engine.saturating_sub(bytes);
        }
        drop(state);
        self.note_times(&flight, completion);
        match flight.request.kind {
            JobKind::Load => self.complete_load(flight, completion),
            JobKind::Store => self.complete_store(flight, completion),
        }
    }

    /// Slots that ended jobs named busy and the kernel still owns.
    pub(crate) fn busy_offsets(&self) -> Vec<u64> {
        let state = lock(&self.state);
        let mut offsets: Vec<u64> = state
            .flights
            .values()
            .filter(|flight| flight.abandoned && flight.buffer.is_none())
            .flat_map(|flight| {
                flight
                    .rows
                    .iter()
                    .filter_map(|row| flight.request.items.get(row.position))
            })
            .map(|item| count(item.offset))
            .collect();
        offsets.sort_unstable();
        offsets
    }

    /// Whether any operation may touch the arena.
    pub(super) fn arena_in_use(&self) -> bool {
        let state = lock(&self.state);
        state.landing > 0 || state.flights.values().any(Flight::uses_slots)
    }

    /// What the root and the machine can do, and what was chosen.
    pub(crate) fn capabilities(&self) -> Map<String, Value> {
        let mut all = self.capabilities.to_map();
        all.insert("io_backend".into(), self.io_backend().into());
        all.insert("io_mode".into(), self.io_mode().into());
        all
    }

    /// The engine that moves rows now.
    pub(super) fn io_backend(&self) -> &'static str {
        let engine = self.engine.get();
        engine.map_or(self.capabilities.io_backend, |engine| engine.name())
    }

    /// `"buffered"` from the start or since the root was found to refuse direct I/O, else `"direct"`.
    pub(super) fn io_mode(&self) -> &'static str {
        let engine = self.engine.get();
        match engine.map(|engine| engine.requirements()) {
            Some(Alignment::NONE) => "buffered",
            _ => self.capabilities.io_mode(),
        }
    }

    /// Whether stores are given up because the writer thread ended.
    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire) || self.is_engine_poisoned()
    }
}
