//! What the tier's one lock guards.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use crate::eviction::EntryId;
use crate::format::checksum::RowChecksum;
use crate::index::{Fingerprint, RowPlace};
use crate::io::OperationId;
use crate::sys::sync::Arc;
use crate::tier::inventory::Inventory;
use crate::tier::kept::Kept;
use crate::tier::load_buffers::{LoadBuffer, LoadBuffers};
use crate::tier::phase::Phase;
use crate::tier::removals::{Removals, StoreNumber};
use crate::tier::request::Request;
use crate::tier::sums::Sums;
use crate::tier::waiters::Waiters;
use crate::tier::written::Written;

/// A row on its way between arena and file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightRow {
    /// Position of the key in the job.
    pub(crate) position: usize,
    /// The row.
    pub(crate) place: RowPlace,
    /// The pinned entry (loads only).
    pub(crate) entry: Option<EntryId>,
    /// Checksum: expected (load) or to be written (store; known once the row is written).
    pub(crate) checksum: RowChecksum,
    /// Order of the row among all stores.
    pub(crate) store_order: u64,
    /// Counter part of the generation (stores only).
    pub(crate) counter: u64,
}

/// One operation in the engine.
#[derive(Debug)]
pub(crate) struct Flight {
    /// The job it belongs to.
    pub(crate) request: Arc<Request>,
    /// Its rows, neighbours in the file, in file order.
    pub(crate) rows: Vec<FlightRow>,
    /// Epoch in which it was planned.
    pub(crate) epoch: u32,
    /// When it was handed to the engine.
    pub(crate) submitted: Instant,
    /// The checksums of what is written; empty for loads.
    pub(crate) sums: Sums,
    /// Where rows are read to instead of their slots.
    pub(crate) buffer: Option<LoadBuffer>,
    /// Its outcomes were given at the deadline; only the kernel's return is awaited.
    pub(crate) abandoned: bool,
    /// The kernel has returned it; its rows are being verified and handed out.
    pub(crate) landing: bool,
}

impl Flight {
    /// Whether the kernel, or a landing to come, may touch its slots.
    pub(crate) const fn uses_slots(&self) -> bool {
        !(self.abandoned && self.buffer.is_some())
    }
}

/// A key that is being stored.
#[derive(Debug)]
pub(crate) struct Writing {
    /// Which store this is: the counter of its row. A later store of the key replaces it.
    pub(crate) counter: u64,
    /// Removed, or reset, before it was listed: it never will be.
    pub(crate) cancelled: bool,
    /// Other stores of the same key, which end as this one does.
    pub(crate) followers: Vec<(Arc<Request>, usize)>,
}

/// A store that waits for the writer thread, from `next` on.
#[derive(Debug)]
pub(crate) struct QueuedStore {
    /// The job.
    pub(crate) request: Arc<Request>,
    /// First position not planned yet.
    pub(crate) next: usize,
    /// Epoch in which it was asked.
    pub(crate) epoch: u32,
    /// Its position among all stores that were asked.
    pub(crate) number: StoreNumber,
    /// Whether some of its keys were planned before.
    pub(crate) is_begun: bool,
}

impl QueuedStore {
    /// Payload bytes of some of its rows.
    pub(crate) fn bytes(&self, rows: &[FlightRow]) -> usize {
        let bytes = |row: &FlightRow| {
            self.request
                .items
                .get(row.position)
                .map(|item| item.row_bytes)
        };
        rows.iter().filter_map(bytes).sum()
    }
}

/// Everything behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    /// Where the tier is in its life.
    pub(crate) phase: Phase,
    /// Index, eviction order, row files.
    pub(crate) inventory: Inventory,
    /// Operations in the engine.
    pub(crate) flights: HashMap<OperationId, Flight>,
    /// Loads back from the kernel whose slots are being verified or filled.
    pub(crate) landing: usize,
    /// Who waits for rows that are being read.
    pub(crate) waiters: Waiters,
    /// Buffers that rows are read to; none where they are read to their slots.
    pub(crate) buffers: Option<LoadBuffers>,
    /// Payload bytes of loads that are not settled.
    pub(crate) load_bytes_open: u64,
    /// Stores not planned yet.
    pub(crate) queued: VecDeque<QueuedStore>,
    /// The stores whose entries the writer thread is writing.
    pub(crate) entering: Vec<Arc<Request>>,
    /// The stores that the writer thread is planning.
    pub(crate) planning: Vec<Arc<Request>>,
    /// The rows that stay while stores are planned.
    pub(crate) kept: Kept,
    /// Payload bytes of stores that are not settled.
    pub(crate) store_bytes_open: u64,
    /// Rows written whose entries are not.
    pub(crate) written: Written,
    /// Bytes of stores that the engine has.
    pub(crate) store_bytes_in_engine: u64,
    /// Keys removed while stores were not planned yet.
    pub(crate) removals: Removals,
    /// Keys being stored.
    pub(crate) writing: HashMap<Fingerprint, Writing>,
    /// Free rows whose entries are to be cleared soon: removed or corrupt ones.
    pub(crate) clears: Vec<RowPlace>,
    /// Jobs by deadline.
    pub(crate) deadlines: VecDeque<Arc<Request>>,
    /// Whether operations may be past their deadline and still with the kernel.
    pub(crate) overdue: bool,
    /// Stores past their deadline of which keys could not be ended then.
    pub(crate) late: Vec<Arc<Request>>,
    /// Epoch in which rows are stored and found.
    pub(crate) epoch: u32,
    /// A reset that could not be recorded: nothing is served or stored until one is.
    pub(crate) reset_failed: bool,
    /// Counter of the next generation.
    pub(crate) next_counter: u64,
    /// Order of the next store.
    pub(crate) next_store_order: u64,
    /// Number of the next operation.
    pub(crate) next_operation: u64,
    /// Whether the writer thread has ended its work.
    pub(crate) writer_done: bool,
}

impl State {
    /// State of a tier that was opened with this inventory.
    pub(crate) fn new(
        inventory: Inventory,
        buffers: Option<LoadBuffers>,
        epoch: u32,
        next_store_order: u64,
    ) -> Self {
        Self {
            phase: Phase::Open,
            inventory,
            flights: HashMap::new(),
            landing: 0,
            waiters: Waiters::default(),
            buffers,
            load_bytes_open: 0,
            queued: VecDeque::new(),
            entering: Vec::new(),
            planning: Vec::new(),
            kept: Kept::default(),
            store_bytes_open: 0,
            written: Written::default(),
            store_bytes_in_engine: 0,
            removals: Removals::default(),
            writing: HashMap::new(),
            clears: Vec::new(),
            deadlines: VecDeque::new(),
            overdue: false,
            late: Vec::new(),
            epoch,
            reset_failed: false,
            next_counter: 1,
            next_store_order,
            next_operation: 1,
            writer_done: false,
        }
    }

    /// Whether rows may be found: not after a reset that could not be recorded, nor while so many
    /// reads are stuck that no row could be loaded.
    pub(crate) fn readable(&self) -> bool {
        let exhausted = self.buffers.as_ref().is_some_and(LoadBuffers::exhausted);
        !(self.reset_failed || exhausted)
    }

    /// A new operation number; never used twice.
    pub(crate) fn operation_id(&mut self) -> OperationId {
        let id = OperationId(self.next_operation);
        self.next_operation = self.next_operation.wrapping_add(1);
        id
    }

    /// Hides a key and lets its row be cleared.
    pub(crate) fn drop_entry(&mut self, entry: EntryId) {
        self.let_go(entry);
        if let Some(place) = self.inventory.unlist(entry) {
            self.clears.push(place);
        }
    }

    /// Takes a load's pin back; a row removed meanwhile is cleared.
    pub(crate) fn unpin(&mut self, entry: EntryId) {
        if let Some(place) = self.inventory.unpin(entry) {
            self.clears.push(place);
        }
    }

    /// Whether a written row may still be listed: not removed, not reset, not stored again.
    pub(crate) fn may_list(&self, fingerprint: Fingerprint, counter: u64) -> bool {
        self.writing
            .get(&fingerprint)
            .is_some_and(|writing| writing.counter == counter && !writing.cancelled)
    }

    /// Hides a key and cancels every store of it that was asked before.
    pub(crate) fn remove(&mut self, fingerprint: Fingerprint) {
        if let Some(entry) = self.inventory.index.find(fingerprint) {
            self.drop_entry(entry);
        }
        if let Some(writing) = self.writing.get_mut(&fingerprint) {
            writing.cancelled = true;
        }
        if !(self.planning.is_empty() && self.queued.is_empty()) {
            self.removals.remove(fingerprint);
        }
    }

    /// Enters a store; whoever followed an earlier one of the same key follows this one.
    pub(crate) fn begin_writing(
        &mut self,
        fingerprint: Fingerprint,
        counter: u64,
        number: StoreNumber,
    ) {
        let cancelled = self.removals.cancel(fingerprint, number);
        let earlier = self.writing.remove(&fingerprint);
        let followers = earlier.map_or_else(Vec::new, |writing| writing.followers);
        self.writing.insert(
            fingerprint,
            Writing {
                counter,
                cancelled,
                followers,
            },
        );
    }

    /// Ends a store; returns who followed it, unless a later store of the key took them over.
    pub(crate) fn end_writing(
        &mut self,
        fingerprint: Fingerprint,
        counter: u64,
    ) -> Vec<(Arc<Request>, usize)> {
        if self
            .writing
            .get(&fingerprint)
            .is_none_or(|writing| writing.counter != counter)
        {
            return Vec::new();
        }
        self.writing
            .remove(&fingerprint)
            .map_or_else(Vec::new, |writing| writing.followers)
    }

    /// Remembers when a job's operations are to be given up; says whether the keeper, which
    /// sleeps until the earliest deadline, must be told.
    pub(crate) fn watch(&mut self, request: &Arc<Request>) -> bool {
        while self.deadlines.front().is_some_and(|front| front.is_done()) {
            self.deadlines.pop_front();
        }
        self.deadlines.push_back(Arc::clone(request));
        self.deadlines.len() == 1
    }
}
