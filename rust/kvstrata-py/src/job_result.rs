//! What became of a job.

use core::marker::PhantomData;

use kvstrata_core::tier::{self, JobKind};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript};

/// A list made once, whose items are of type `T`.
#[derive(Debug)]
struct ListOf<T> {
    list: Py<PyList>,
    items: PhantomData<fn() -> T>,
}

impl<T> ListOf<T> {
    fn new(list: Bound<'_, PyList>) -> Self {
        Self {
            list: list.unbind(),
            items: PhantomData,
        }
    }
}

impl<'py, T: IntoPyObject<'py>> IntoPyObject<'py> for &ListOf<T> {
    type Target = PyList;
    type Output = Bound<'py, PyList>;
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const OUTPUT_TYPE: PyStaticExpr =
        type_hint_subscript!(type_hint_identifier!("builtins", "list"), T::OUTPUT_TYPE);

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        Ok(self.list.bind(py).clone())
    }
}

/// What became of a job.
///
/// * ``job_id``: the number given with the job.
/// * ``kind``: ``"store"`` or ``"load"``.
/// * ``success``: whether every outcome is ``"ok"`` or ``"present"``.
/// * ``outcomes``: one per key, in the order of ``keys``: ``"ok"``, ``"present"`` (a store of a
///   row that is there already), ``"miss"``, ``"corrupt"``, ``"no_space"``, ``"io_error"``,
///   ``"timeout"`` or ``"dropped"``. Only after ``"ok"`` does the slot of a load hold the row.
/// * ``busy``: positions whose slots the kernel still owns; empty unless ``honours_busy``.
/// * ``bytes``: payload bytes moved.
/// * ``seconds``: from the call to the end of the job.
/// * ``error``: what went wrong, in one line; ``None`` when nothing did.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct JobResult {
    job_id: u64,
    kind: &'static str,
    success: bool,
    outcomes: ListOf<&'static str>,
    busy: ListOf<usize>,
    bytes: u64,
    seconds: f64,
    error: Option<String>,
}

impl JobResult {
    pub(crate) fn new(py: Python<'_>, result: tier::JobResult) -> PyResult<Self> {
        let outcomes = result
            .outcomes
            .iter()
            .map(|outcome| PyString::intern(py, outcome.as_str()));
        Ok(Self {
            job_id: result.job_id,
            kind: match result.kind {
                JobKind::Store => "store",
                JobKind::Load => "load",
            },
            success: result.success(),
            outcomes: ListOf::new(PyList::new(py, outcomes)?),
            busy: ListOf::new(PyList::new(py, &result.busy)?),
            bytes: result.bytes,
            seconds: result.seconds,
            error: result.error,
        })
    }
}

#[pymethods]
impl JobResult {
    /// The number given with the job.
    #[getter]
    fn job_id(&self) -> u64 {
        self.job_id
    }

    /// ``"store"`` or ``"load"``.
    #[getter]
    fn kind(&self) -> &'static str {
        self.kind
    }

    /// Whether every outcome is ``"ok"`` or ``"present"``.
    #[getter]
    fn success(&self) -> bool {
        self.success
    }

    /// One outcome per key, in the order of ``keys``.
    #[getter]
    fn outcomes(&self) -> &ListOf<&'static str> {
        &self.outcomes
    }

    /// Positions whose slots the kernel still owns.
    #[getter]
    fn busy(&self) -> &ListOf<usize> {
        &self.busy
    }

    /// Payload bytes moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Seconds from the call to the end of the job.
    #[getter]
    fn seconds(&self) -> f64 {
        self.seconds
    }

    /// What went wrong, in one line.
    #[getter]
    fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let success = if self.success { "True" } else { "False" };
        let error = self.error.as_deref().into_pyobject(py)?.repr()?.to_string();
        Ok(format!(
            "JobResult(job_id={}, kind='{}', success={success}, outcomes={}, busy={}, bytes={}, \
             seconds={:.6}, error={error})",
            self.job_id,
            self.kind,
            self.outcomes.list.bind(py).repr()?,
            self.busy.list.bind(py).repr()?,
            self.bytes,
            self.seconds,
        ))
    }
}
