//! A tier as Python sees it.

use core::time::Duration;
use std::sync::Arc;

use kvstrata_core::error::{Error, ErrorKind};
use kvstrata_core::eviction::request::{Context, Hint};
use kvstrata_core::key::Key;
use kvstrata_core::{job, tier};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{
    self as named, Deferred, JobId, Keys, NewTokens, Number32, Offsets, OutputTokens, PromptTokens,
    RequestId, Seconds, Text, Timeout, optional,
};
use crate::error::{exception, raised};
use crate::handle::Handle;
use crate::job_result::JobResult;
use crate::json;

/// Longest stretch of a wait between two looks for signals.
const SLICE: Duration = Duration::from_millis(100);
/// How long closing takes at most, where nothing else is said.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A storage tier on a directory or a bucket; made by :func:`kvstrata.open_tier`.
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
    pub(crate) handle: Arc<Handle>,
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

    /// Whether a row can be loaded, without giving the interpreter lock away: it takes less than a
    /// microsecond. A closed tier has nothing.
    pub(crate) fn has(&self, key: &Key) -> Option<bool> {
        self.handle.has(key)
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
    fn lookup(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<Vec<Option<bool>>> {
        let keys = keys.get()?;
        self.checked(py, |tier| tier.lookup(&keys.0))
    }

    /// Starts to store the slot at ``offsets[i]`` as the row of ``keys[i]``; returns at once.
    ///
    /// ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
    fn store(
        &self,
        py: Python<'_>,
        job_id: Deferred<JobId>,
        keys: Deferred<Keys>,
        offsets: Deferred<Offsets>,
    ) -> PyResult<()> {
        let (job_id, keys, offsets) = (job_id.get()?, keys.get()?, offsets.get()?);
        self.checked(py, |tier| tier.store(job_id.0, &keys.0, &offsets.0))
    }

    /// Starts to load the row of ``keys[i]`` into the slot at ``offsets[i]``; returns at once.
    ///
    /// ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
    fn load(
        &self,
        py: Python<'_>,
        job_id: Deferred<JobId>,
        keys: Deferred<Keys>,
        offsets: Deferred<Offsets>,
    ) -> PyResult<()> {
        let (job_id, keys, offsets) = (job_id.get()?, keys.get()?, offsets.get()?);
        self.checked(py, |tier| tier.load(job_id.0, &keys.0, &offsets.0))
    }

    /// The results of jobs that ended since the last call; clears ``fileno()``.
    fn poll(&self, py: Python<'_>) -> PyResult<Vec<JobResult>> {
        Self::results(py, self.checked(py, tier::Tier::poll)?)
    }

    /// Blocks until a result is there or ``timeout_s`` seconds are over, then polls.
    fn wait(
        &self,
        py: Python<'_>,
        timeout_s: Deferred<Seconds<Timeout>>,
    ) -> PyResult<Vec<JobResult>> {
        let mut left = timeout_s.value()?;
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
    fn touch(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<()> {
        let keys = keys.get()?;
        self.checked(py, |tier| tier.touch(&keys.0))
    }

    /// A request has arrived: its one access to its keys, whichever of them are here.
    ///
    /// * ``request_id``: any text that no other open request has; one that is open changes nothing.
    /// * ``keys``: all its keys in token order, found or not.
    /// * ``prompt_tokens``: tokens of its prompt, ``None`` if not known.
    /// * ``new_tokens``: those of them that no earlier request had, ``None`` if not known.
    /// * ``hint``: ``"tool_use"`` or ``"end_of_turn"``: what follows, if the caller knows.
    ///
    /// Loads and touches of its keys do not count again until ``finish``, and its rows go last.
    #[pyo3(signature = (request_id, keys, *, prompt_tokens, new_tokens, hint=None))]
    fn observe(
        &self,
        py: Python<'_>,
        request_id: Deferred<Text<RequestId>>,
        keys: Deferred<Keys>,
        prompt_tokens: Option<Deferred<Number32<PromptTokens>>>,
        new_tokens: Option<Deferred<Number32<NewTokens>>>,
        hint: Option<Deferred<Text<named::Hint>>>,
    ) -> PyResult<()> {
        let (request_id, keys) = (request_id.value()?, keys.get()?);
        let context = Context {
            prompt_tokens: optional(prompt_tokens)?,
            new_tokens: optional(new_tokens)?,
            hint: hint_of(py, hint)?,
        };
        self.checked(py, |tier| tier.observe(&request_id, &keys.0, context))
    }

    /// An observed request has ended with a response of so many tokens; ``None`` if not known.
    ///
    /// One that is not open is ignored.
    fn finish(
        &self,
        py: Python<'_>,
        request_id: Deferred<Text<RequestId>>,
        output_tokens: Option<Deferred<Number32<OutputTokens>>>,
    ) -> PyResult<()> {
        let (request_id, output_tokens) = (request_id.value()?, optional(output_tokens)?);
        self.checked(py, |tier| tier.finish(&request_id, output_tokens))
    }

    /// Hides each key's row at once; its space follows. Unknown keys are ignored.
    fn remove(&self, py: Python<'_>, keys: Deferred<Keys>) -> PyResult<()> {
        let keys = keys.get()?;
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

    /// Counters and gauges, with units in their names; ``docs/STATS.md`` lists them.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        json::dict(py, &self.checked(py, tier::Tier::stats)?)
    }

    /// What was found out about the directory or bucket when it was opened.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        json::dict(py, &self.checked(py, tier::Tier::capabilities)?)
    }

    /// Closes the tier and gives the arena back, within ``timeout_s`` seconds.
    ///
    /// Raises ``BusyError`` only while the kernel still owns bytes of the arena; call it again
    /// then. After success it does nothing. A forked child is refused, as by every method: the tier
    /// is its parent's. Leaving a ``with`` block there closes nothing.
    #[pyo3(signature = (timeout_s=Deferred::of(CLOSE_TIMEOUT)), text_signature = "($self, timeout_s=10.0)")]
    fn close(&self, py: Python<'_>, timeout_s: Deferred<Seconds<Timeout>>) -> PyResult<()> {
        self.handle.close(py, timeout_s.value()?)
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
        // A child that leaves its parent's `with` block has nothing to close, and must not end with
        // another error than its own.
        if self.handle.is_forked() {
            return Ok(());
        }
        self.handle.close(py, CLOSE_TIMEOUT)
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

/// What follows a request, by its name.
///
/// # Errors
/// `ArgumentError` for a name that is not known.
pub(crate) fn hint_of(py: Python<'_>, name: Option<Deferred<Text<named::Hint>>>) -> PyResult<Hint> {
    match optional(name)?.as_deref() {
        None => Ok(Hint::None),
        Some("tool_use") => Ok(Hint::ToolUse),
        Some("end_of_turn") => Ok(Hint::EndOfTurn),
        Some(other) => {
            let text = format!("hint is {other:?}; \"tool_use\" or \"end_of_turn\" is expected");
            Err(exception(py, ErrorKind::Argument, text))
        }
    }
}
