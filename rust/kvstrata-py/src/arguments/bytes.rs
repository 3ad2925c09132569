//! Bytes that are read where they lie.

use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::type_name;
use crate::error::exception;

/// An argument that is `bytes`.
///
/// # Errors
/// `ArgumentError` naming the argument, for anything else.
pub(crate) fn bytes<'a, 'py>(
    name: &str,
    object: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, PyBytes>> {
    object.cast::<PyBytes>().map_err(|_| {
        let text = format!("{name} is {}; bytes are expected", type_name(object));
        exception(object.py(), ErrorKind::Argument, text)
    })
}
