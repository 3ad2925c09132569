//! A job inside the tier: its keys and slots, and what of it is still open.

use std::time::Instant;

use crate::eviction::EntryId;
use crate::index::{Fingerprint, Fingerprinter};
use crate::job::{JobId, JobKind};
use crate::key::Key;
use crate::sys::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sys::sync::{Mutex, lock};

/// A key and its slot, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// The whole key.
    pub(crate) key: Key,
    /// Its fingerprint in this process's index.
    pub(crate) fingerprint: Fingerprint,
    /// First byte of the slot in the arena.
    pub(crate) offset: usize,
    /// Payload bytes of the key's group.
    pub(crate) row_bytes: usize,
}

impl Item {
    /// The items of a job whose slots, first byte and length each, were checked.
    pub(crate) fn all(
        keys: &[Key],
        slots: Vec<(usize, usize)>,
        fingerprinter: &Fingerprinter,
    ) -> Vec<Self> {
        let item = |(key, (offset, row_bytes)): (&Key, _)| Self {
            key: *key,
            fingerprint: fingerprinter.of(key),
            offset,
            row_bytes,
        };
        keys.iter().zip(slots).map(item).collect()
    }
}

/// A checked job.
#[derive(Debug)]
pub(crate) struct Request {
    /// The caller's number.
    pub(crate) job_id: JobId,
    /// Which way it goes.
    pub(crate) kind: JobKind,
    /// Keys and slots in the caller's order.
    pub(crate) items: Vec<Item>,
    /// When operations that have not started are given up.
    pub(crate) deadline: Instant,
    /// Keys without an outcome.
    open: AtomicUsize,
    /// Of these, keys whose rows are written and whose entries are not (stores only).
    written: AtomicUsize,
    /// Whether its deadline was counted against the device.
    late: AtomicBool,
    /// Whether keys of it ended while the writer had them (stores only).
    abandoned: AtomicBool,
    /// Rows stored so far, to put them in order when the last one is.
    stored: Mutex<Vec<(usize, EntryId)>>,
}

impl Request {
    /// A job with nothing done yet.
    pub(crate) fn new(job_id: JobId, kind: JobKind, items: Vec<Item>, deadline: Instant) -> Self {
        let open = AtomicUsize::new(items.len());
        Self {
            job_id,
            kind,
            items,
            deadline,
            open,
            written: AtomicUsize::new(0),
            late: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            stored: Mutex::default(),
        }
    }

    /// Counts `settled` keys as done; says whether these were the last.
    pub(crate) fn settle(&self, settled: usize) -> bool {
        let before = self.open.fetch_sub(settled, Ordering::AcqRel);
        debug_assert!(before >= settled, "a key was settled twice");
        before == settled
    }

    /// Whether every key has its outcome.
    pub(crate) fn is_done(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Counts rows whose bytes are written; says whether the job waits for nothing but entries.
    pub(crate) fn wrote(&self, rows: usize) -> bool {
        self.written.fetch_add(rows, Ordering::AcqRel);
        self.waits_for_entries()
    }

    /// Counts rows whose entries are being written, or never will be.
    pub(crate) fn entered(&self, rows: usize) {
        self.written.fetch_sub(rows, Ordering::AcqRel);
    }

    /// Whether the rows of all keys without an outcome are written: entries are all it waits for.
    pub(crate) fn waits_for_entries(&self) -> bool {
        let written = self.written.load(Ordering::Acquire);
        written > 0 && written >= self.open.load(Ordering::Acquire)
    }

    /// Notes that it is past its deadline; says whether this is the first time.
    pub(crate) fn note_late(&self) -> bool {
        !self.late.swap(true, Ordering::AcqRel)
    }

    /// Notes that keys of it have ended that the writer has: none of their slots may be read.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Whether keys of it ended while the writer had them.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Remembers a stored row.
    pub(crate) fn remember(&self, position: usize, entry: EntryId) {
        lock(&self.stored).push((position, entry));
    }

    /// The stored rows in the order of the keys.
    pub(crate) fn take_stored(&self) -> Vec<(usize, EntryId)> {
        let mut stored = core::mem::take(&mut *lock(&self.stored));
        stored.sort_unstable_by_key(|(position, _)| *position);
        stored
    }

    /// Payload bytes of all keys.
    pub(crate) fn bytes(&self) -> u64 {
        self.items
            .iter()
            .map(|item| u64::try_from(item.row_bytes).unwrap_or(u64::MAX))
            .fold(0, u64::saturating_add)
    }
}
