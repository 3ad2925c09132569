//! The one place where the core's errors become Python exceptions.

use kvstrata_core::error::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static ARGUMENT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CLOSED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static BUSY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static OTHER: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The exception for `kind`, with `message` as its text.
pub(crate) fn exception(py: Python<'_>, kind: ErrorKind, message: String) -> PyErr {
    let (class, name) = match kind {
        ErrorKind::Argument => (&ARGUMENT, "ArgumentError"),
        ErrorKind::Config => (&CONFIG, "ConfigError"),
        ErrorKind::Closed => (&CLOSED, "ClosedError"),
        ErrorKind::Busy => (&BUSY, "BusyError"),
        _ => (&OTHER, "KVStrataError"),
    };
    match class.import(py, "kvstrata.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), message),
        Err(error) => error,
    }
}

/// The exception for an error of the core.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error.kind(), error.to_string())
}

/// The exception for an error met while a tier is opened: whatever stands in the way is a matter
/// of configuration, except the tier being closed or busy, which cannot be yet.
pub(crate) fn refused(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, ErrorKind::Config, error.to_string())
}
