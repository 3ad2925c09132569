//! A tier as Python sees it.

use core::time::Duration;
use std::sync::Arc;

use kvstrata_core::config::TierOptions;
use kvstrata_core::error::Error;
use kvstrata_core::{job, tier};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::ArenaBuffer;
use crate::arguments::{
    Capacity, Deadline, Flag, HonoursBusy, IoBackend, JobId, Keys, MinFree, Offsets, Policy,
    Required, Root, RowBytes, Seconds, ShareMode, SizeText, Text, Timeout,
};
use crate::error::{raised, refused};
use crate::handle::Handle;
use crate::job_result::JobResult;
use crate::json::{self, Manifest};
use crate::notices;

/// Longest stretch of a wait between two looks for signals.
const SLICE: Duration = Duration::from_millis(100);

/// Opens a tier on a directory.
///
/// * ``url``: ``file:///var/kv`` or a path; the directory is created if it is missing.
/// * ``manifest``: identity fields, any JSON values. ``"model"`` (str, required) names the
///   directory. Format version, group ids and ``row_bytes`` are added. Rows are only ever shared
///   between tiers whose whole manifests are equal.
/// * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
/// * ``arena``: writable, C-contiguous buffer that holds the slots. The tier keeps it until it is
///   closed: until then it can be neither freed nor resized.
/// * ``capacity``: bytes the tier may use: ``"10GiB"``, ``"80%"`` of the file system, or an int.
/// * ``min_free``: bytes to leave free on the file system, in the same forms.
/// * ``policy``: which rows go first when space is needed; ``"lru"``.
/// * ``io_backend``: ``"auto"``, ``"threads"`` or ``"uring"``.
/// * ``deadline_s``: seconds after which an operation counts as failed.
/// * ``share_mode``: ``"private"``: only this user can read the rows.
/// * ``required``: False gives, where the root cannot be used, a tier that misses and retries by
///   itself.
/// * ``honours_busy``: False: a result comes only when the kernel has returned every operation on
///   the job's slots. True: a load may end at its deadline with ``busy`` positions, and the caller
///   does not reuse those slots while ``busy_offsets()`` names them.
///
/// Raises ``ConfigError`` (also a ``ValueError``), which names the argument, path or field.
#[pyfunction]
#[pyo3(
    signature = (
        url, *, manifest, row_bytes, arena, capacity, min_free=SizeText::percent(5.0),
        policy=Text::new("lru"), io_backend=Text::new("auto"), deadline_s=Seconds::new(30),
        share_mode=Text::new("private"), required=Flag::TRUE, honours_busy=Flag::FALSE,
    ),
    text_signature = "(url, *, manifest, row_bytes, arena, capacity, min_free='5%', policy='lru', \
        io_backend='auto', deadline_s=30.0, share_mode='private', required=True, honours_busy=False)"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "each has a name in Python, where they are keywords"
)]
pub(crate) fn open_tier(
    py: Python<'_>,
    url: Root,
    manifest: Manifest,
    row_bytes: RowBytes,
    arena: ArenaBuffer,
    capacity: SizeText<Capacity>,
    min_free: SizeText<MinFree>,
    policy: Text<Policy>,
    io_backend: Text<IoBackend>,
    deadline_s: Seconds<Deadline>,
    share_mode: Text<ShareMode>,
    required: Flag<Required>,
    honours_busy: Flag<HonoursBusy>,
) -> PyResult<Tier> {
    let options = TierOptions {
        root: url.0,
        identity: manifest.0,
        row_bytes: row_bytes.0,
        capacity: capacity.value,
        min_free: min_free.value,
        policy: policy.value,
        io_backend: io_backend.value,
        deadline: deadline_s.value,
        share_mode: share_mode.value,
        required: required.value,
        honours_busy: honours_busy.value,
    };
    let (arena, buffer) = arena.split();
    let opened = py.detach(|| {
        tier::Tier::open(options, arena).map(|tier| {
            let notices = tier.take_notices();
            (tier, notices)
        })
    });
    let (tier, notices) = opened.map_err(|error| refused(py, &error))?;
    let handle = Handle::new(tier, buffer);
    notices::log(py, notices);
    Ok(Tier { handle })
}

/// A storage tier on a directory; made by :func:`kvstrata.open_tier`.
///
/// A key is a block hash (16 to 64 bytes) and a 4-byte big-endian group id; an offset is the
/// byte offset of a slot in the arena. A slot of a store must not be written, nor one of a load
/// read, before the job's result was polled. Every method may be called from any thread.
///
/// A wrong argument raises ``ArgumentError`` (also a ``ValueError``), a closed tier
/// ``ClosedError``; nothing else raises but ``close``. As a context manager the tier is closed
/// at the end.
#[pyclass(frozen, module = "kvstrata")]
pub(crate) struct Tier {
    handle: Arc<Handle>,
}

impl Tier {
    /// Runs a call that can be refused.
    fn checked<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&tier::Tier) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.handle
            .detached(py, work)?
            .map_err(|error| raised(py, &error))
    }

    fn results(py: Python<'_>, results: Vec<job::JobResult>) -> PyResult<Vec<JobResult>> {
        results
            .into_iter()
            .map(|result| JobResult::new(py, result))
            .collect()
    }
}

#[pymethods]
impl Tier {
    /// For each key: True when its row can be loaded, False when not, None when not known yet.
    ///
    /// None means: ask again. Answered from memory, never from disk; neither pins a row nor
    /// counts as an access.
    fn lookup(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<Option<bool>>> {
        self.checked(py, |tier| tier.lookup(&keys.0))
    }

    /// Starts to store the slot at ``offsets[i]`` as the row of ``keys[i]``; returns at once.
    ///
    /// ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
    fn store(&self, py: Python<'_>, job_id: JobId, keys: Keys, offsets: Offsets) -> PyResult<()> {
        self.checked(py, |tier| tier.store(job_id.0, &keys.0, &offsets.0))
    }

    /// Starts to load the row of ``keys[i]`` into the slot at ``offsets[i]``; returns at once.
    ///
    /// ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
    fn load(&self, py: Python<'_>, job_id: JobId, keys: Keys, offsets: Offsets) -> PyResult<()> {
        self.checked(py, |tier| tier.load(job_id.0, &keys.0, &offsets.0))
    }

    /// The results of jobs that ended since the last call; clears ``fileno()``.
    fn poll(&self, py: Python<'_>) -> PyResult<Vec<JobResult>> {
        Self::results(py, self.checked(py, tier::Tier::poll)?)
    }

    /// Blocks until a result is there or ``timeout_s`` seconds are over, then polls.
    fn wait(&self, py: Python<'_>, timeout_s: Seconds<Timeout>) -> PyResult<Vec<JobResult>> {
        let mut left = timeout_s.value;
        loop {
            let slice = left.min(SLICE);
            let results = self.checked(py, |tier| tier.wait(slice))?;
            left = left.saturating_sub(slice);
            if !results.is_empty() || left.is_zero() {
                return Self::results(py, results);
            }
            py.check_signals()?;
        }
    }

    /// Blocks without limit until no operation touches the arena; results stay to be polled.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        while !self.checked(py, |tier| tier.drain_for(SLICE))? {
            py.check_signals()?;
        }
        Ok(())
    }

    /// An eventfd that is readable while results wait to be polled. It belongs to the tier.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.checked(py, tier::Tier::fileno)
    }

    /// The slots that ended jobs named busy and the kernel still owns.
    ///
    /// Empty unless ``honours_busy``.
    fn busy_offsets(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.checked(py, tier::Tier::busy_offsets)
    }

    /// Counts as an access to each key's row; unknown keys are ignored.
    fn touch(&self, py: Python<'_>, keys: Keys) -> PyResult<()> {
        self.checked(py, |tier| tier.touch(&keys.0))
    }

    /// Hides each key's row at once; its space follows. Unknown keys are ignored.
    fn remove(&self, py: Python<'_>, keys: Keys) -> PyResult<()> {
        self.checked(py, |tier| tier.remove(&keys.0))
    }

    /// Hides every row for good, also after a restart.
    ///
    /// Jobs in flight still deliver a result: stores ``"dropped"``, loads ``"miss"``. Returns
    /// False when the tier could not record it; the tier then serves nothing until a later reset
    /// was recorded.
    fn reset(&self, py: Python<'_>) -> PyResult<bool> {
        self.checked(py, tier::Tier::reset)
    }

    /// Counters and gauges, with units in their names.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        json::dict(py, &self.checked(py, tier::Tier::stats)?)
    }

    /// What was found out about the root when it was opened.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        json::dict(py, &self.checked(py, tier::Tier::capabilities)?)
    }

    /// Closes the tier and gives the arena back, within ``timeout_s`` seconds.
    ///
    /// Raises ``BusyError`` only while the kernel still owns bytes of the arena; call it again
    /// then. After success it does nothing. A child of a fork cannot close its parent's tier:
    /// there it does nothing either.
    #[pyo3(signature = (timeout_s=Seconds::new(10)), text_signature = "($self, timeout_s=10.0)")]
    fn close(&self, py: Python<'_>, timeout_s: Seconds<Timeout>) -> PyResult<()> {
        self.handle.close(py, timeout_s.value)
    }

    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        slf.get().handle.detached(py, |_| ())?;
        Ok(slf)
    }

    #[pyo3(signature = (_type: "object", _exception: "object", _traceback: "object"))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _type: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py, Seconds::new(10))
    }

    fn __repr__(&self) -> &'static str {
        if self.handle.is_closed() {
            "<kvstrata.Tier, closed>"
        } else {
            "<kvstrata.Tier>"
        }
    }

    #[pyo3(signature = () -> "tuple[Any, ...]")]
    #[expect(clippy::unused_self, reason = "Python calls it as a method")]
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a tier holds memory and threads of this process: it cannot be pickled or copied",
        ))
    }
}
