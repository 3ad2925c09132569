//! The CPU tier as Python sees it. No call blocks, so none gives the interpreter lock away: to get
//! it back would take longer than the call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvstrata_core::cpu;
use kvstrata_core::cpu::{Handle, Place, Presence, User};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyDict};
use serde_json::{Map, Value, json};

use crate::arguments::{
    self as named, Count, Deferred, Flag, Given, Keys, Number64, Numbers, Policy, Probability,
    RowBytes, Text,
};
use crate::error::{raised, refused};
use crate::json;
use crate::open::admission;
use crate::requests::Book;

/// Positions of keys, offsets and handles of their slots, and the keys that made room.
type Prepared<'py> = (Vec<usize>, Vec<u64>, Vec<u64>, Vec<Bound<'py, PyBytes>>);

/// Which key's row is in which slot of an arena, and which rows go when space is needed.
///
/// * ``arena_bytes``: length of the arena. The tier never touches the arena itself.
/// * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
/// * ``align``: what every slot's offset is a multiple of; a power of two.
/// * ``policy``: which rows go first when space is needed; ``"lru"``.
/// * ``theta``, ``store_threshold``, ``tracked_keys``, ``directory``: as for ``open_tier``, but
///   that ``theta`` is 0.0 where it is not given. Rows from a tier below are always taken.
/// * ``protect_waiting``: whether rows stay for requests that were observed and do not run yet, in
///   up to half of the arena.
///
/// Keys are as for :class:`kvstrata.Tier`. Every method may be called from any thread and takes
/// microseconds. A use of a slot by a tier below has a handle; uses by workers go by key.
///
/// Raises ``ConfigError`` for an arena that does not hold the largest row, or an unknown policy.
#[pyclass(frozen, module = "kvstrata")]
pub(crate) struct CpuTier {
    shared: Mutex<Shared>,
}

/// The tier, and the requests of the manager on it: one lock for both.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) tier: cpu::CpuTier,
    pub(crate) book: Option<Book>,
}

impl CpuTier {
    /// The tier. A request book that asks Python's own objects may have it while they give the
    /// interpreter lock away.
    pub(crate) fn shared(&self, py: Python<'_>) -> MutexGuard<'_, Shared> {
        self.shared
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl CpuTier {
    #[new]
    #[pyo3(
        signature = (
            arena_bytes, row_bytes, *, align=Deferred::of(64),
            policy=Deferred::of("lru".to_owned()), theta=Given::ABSENT,
            store_threshold=Given::ABSENT, tracked_keys=Given::ABSENT, directory=Given::ABSENT,
            protect_waiting=Deferred::of(true)
        ),
        text_signature = "(arena_bytes, row_bytes, *, align=64, policy='lru', theta=0.0, \
            store_threshold=1, tracked_keys=64000, directory=..., protect_waiting=True)"
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "each has a name in Python, where they are keywords"
    )]
    fn new(
        py: Python<'_>,
        arena_bytes: Deferred<Number64<named::ArenaBytes>>,
        row_bytes: Deferred<RowBytes>,
        align: Deferred<Number64<named::Align>>,
        policy: Deferred<Text<Policy>>,
        theta: Given<Probability<named::Theta>>,
        store_threshold: Given<Count<named::StoreThreshold>>,
        tracked_keys: Given<Count<named::TrackedKeys>>,
        directory: Given<Count<named::Directory>>,
        protect_waiting: Deferred<Flag<named::ProtectWaiting>>,
    ) -> PyResult<Self> {
        let arena_bytes = arena_bytes.value()?;
        let row_bytes = row_bytes.get()?;
        let align = align.value()?;
        let policy = policy.value()?;
        let admission = admission(theta, store_threshold, tracked_keys, directory, 0.0)?;
        let own = cpu::CpuOptions::default();
        let options = cpu::CpuOptions {
            arena_bytes,
            align,
            row_bytes: row_bytes.0.into_iter().collect(),
            policy,
            directory: admission.directory,
            admission,
            awaited_share: if protect_waiting.value()? {
                own.awaited_share
            } else {
                0
            },
        };
        let tier = cpu::CpuTier::new(options).map_err(|error| refused(py, &error))?;
        Ok(Self {
            shared: Mutex::new(Shared { tier, book: None }),
        })
    }

    /// Which keys' rows can be loaded: True, False, or None while the row is being written.
    ///
    /// Neither pins a row nor counts as an access.
    fn lookup(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<Vec<Option<bool>>> {
        let keys = keys.get()?;
        let found = self.shared(py).tier.lookup(&keys.0);
        Ok(found
            .into_iter()
            .map(|one| match one {
                Presence::Absent => Some(false),
                Presence::Writing => None,
                Presence::Ready => Some(true),
            })
            .collect())
    }

    /// Takes a slot for each key without a row, which is then being written.
    ///
    /// A worker writes it, or, with ``below``, a tier below.
    ///
    /// Returns the positions of these keys in ascending order, their slots' byte offsets and
    /// handles, and the keys whose rows made room. None when not all find a slot: then nothing has
    /// changed. Rows of ``keys`` that are there stay and count as accessed.
    #[pyo3(
        signature = (keys, *, below=Deferred::of(false)),
        text_signature = "($self, keys, *, below=False)"
    )]
    fn prepare_store<'py>(
        &self,
        py: Python<'py>,
        keys: Deferred<Keys>,
        below: Deferred<Flag<named::Below>>,
    ) -> PyResult<Option<Prepared<'py>>> {
        let keys = keys.get()?;
        let user = if below.value()? {
            User::Tier
        } else {
            User::Worker
        };
        let prepared = self
            .shared(py)
            .tier
            .prepare_store(&keys.0, user)
            .map_err(|error| raised(py, &error))?;
        Ok(prepared.map(|prepared| {
            let places = &prepared.places;
            let evicted = prepared.evicted.iter();
            (
                prepared.positions,
                places.iter().map(|place| place.offset).collect(),
                places.iter().map(|place| place.handle.0).collect(),
                evicted
                    .map(|key| PyBytes::new(py, key.as_bytes()))
                    .collect(),
            )
        }))
    }

    /// Ends the writing of a worker: rows become ready, or go.
    ///
    /// Returns the positions of the keys that became ready; keys without a row that a worker
    /// writes are ignored.
    #[pyo3(
        signature = (keys, success=Deferred::of(true)),
        text_signature = "($self, keys, success=True)"
    )]
    fn complete_store(
        &self,
        py: Python<'_>,
        keys: Deferred<Keys>,
        success: Deferred<Flag<named::Success>>,
    ) -> PyResult<Vec<usize>> {
        let (keys, success) = (keys.get()?, success.value()?);
        Ok(self.shared(py).tier.complete_store(&keys.0, success))
    }

    /// Pins all rows for a worker and counts one access.
    ///
    /// Returns their slots' byte offsets; None, and nothing is pinned, unless all are ready.
    fn prepare_load(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<Option<Vec<u64>>> {
        let keys = keys.get()?;
        let places = self.shared(py).tier.prepare_load(&keys.0);
        Ok(places.map(|places| places.iter().map(|place| place.offset).collect()))
    }

    /// Takes one pin of a worker from each key's row.
    fn complete_load(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<()> {
        let keys = keys.get()?;
        self.shared(py).tier.complete_load(&keys.0);
        Ok(())
    }

    /// Pins the rows that are ready for a tier below.
    ///
    /// Returns a handle and a byte offset for each, None for the others.
    fn hold_ready(
        &self,
        py: Python<'_>,
        keys: Deferred<Keys>,
    ) -> PyResult<Vec<Option<(u64, u64)>>> {
        let keys = keys.get()?;
        let held = self.shared(py).tier.hold_ready(&keys.0);
        let pair = |place: Place| (place.handle.0, place.offset);
        Ok(held.into_iter().map(|place| place.map(pair)).collect())
    }

    /// Ends uses of a tier below.
    ///
    /// Rows that it was writing become ready with ``success``, and go without. Handles of no use
    /// are ignored.
    #[pyo3(
        signature = (handles, success=Deferred::of(true)),
        text_signature = "($self, handles, success=True)"
    )]
    fn let_go(
        &self,
        py: Python<'_>,
        handles: Deferred<Numbers<named::Handles>>,
        success: Deferred<Flag<named::Success>>,
    ) -> PyResult<()> {
        let handles: Vec<Handle> = handles.value()?.into_iter().map(Handle).collect();
        self.shared(py).tier.let_go(&handles, success.value()?);
        Ok(())
    }

    /// Makes rows that a tier below writes absent at once.
    ///
    /// Their slots stay taken until ``let_go``.
    fn abandon(&self, py: Python<'_>, handles: Deferred<Numbers<named::Handles>>) -> PyResult<()> {
        let handles: Vec<Handle> = handles.value()?.into_iter().map(Handle).collect();
        self.shared(py).tier.abandon(&handles);
        Ok(())
    }

    /// Forgets the rows that are ready and not in use.
    fn forget(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<()> {
        let keys = keys.get()?;
        self.shared(py).tier.forget(&keys.0);
        Ok(())
    }

    /// Forgets every row.
    ///
    /// Slots in use stay taken until ``let_go``, and ``flushed`` for workers.
    fn reset(&self, py: Python<'_>) {
        self.shared(py).tier.reset();
    }

    /// The workers have ended all that they were doing at the last reset.
    fn flushed(&self, py: Python<'_>) {
        self.shared(py).tier.flushed();
    }

    /// Counters and gauges, with units in their names; ``docs/STATS.md`` lists them.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.shared(py).tier.stats();
        json::dict(py, &stats)
    }

    /// How the arena is cut.
    ///
    /// ``slab_bytes``, ``slabs``, ``tail_bytes``, ``align``, and per group id ``slot_bytes`` and
    /// ``rows``, the slots it has when all are its own.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn geometry<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let described = geometry(&self.shared(py).tier);
        json::dict(py, &described)
    }

    #[pyo3(signature = () -> "tuple[Any, ...]")]
    #[expect(clippy::unused_self, reason = "Python calls it as a method")]
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a tier names slots of memory of this process: it cannot be pickled or copied",
        ))
    }
}

fn geometry(tier: &cpu::CpuTier) -> Map<String, Value> {
    let geometry = tier.slots().geometry();
    let mut slot_bytes = Map::new();
    let mut rows = Map::new();
    for (position, group) in tier.groups().enumerate() {
        if let Some(class) = geometry.class_of(position) {
            slot_bytes.insert(group.to_string(), json!(geometry.stride(class)));
            rows.insert(group.to_string(), json!(geometry.rows(class)));
        }
    }
    let mut fields = Map::new();
    fields.insert("arena_bytes".to_owned(), json!(geometry.arena_bytes()));
    fields.insert("align".to_owned(), json!(geometry.align()));
    fields.insert("slab_bytes".to_owned(), json!(geometry.slab_bytes()));
    fields.insert("slabs".to_owned(), json!(geometry.slabs()));
    fields.insert("tail_bytes".to_owned(), json!(geometry.tail_bytes()));
    fields.insert("slot_bytes".to_owned(), Value::Object(slot_bytes));
    fields.insert("rows".to_owned(), Value::Object(rows));
    fields
}
