//! The byte offsets of a job's slots.

use kvstrata_core::error::ErrorKind;
use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript};

use super::keys::RESERVED_MAX;
use super::{shown, type_name};
use crate::error::exception;

/// A sequence of ints, or a one-dimensional array of 64-bit ints, which is taken without making an
/// object of each.
pub(crate) struct Offsets(pub(crate) Vec<u64>);

impl FromPyObject<'_, '_> for Offsets {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_identifier!("typing", "SupportsIndex")
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let plain = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
        if !plain && let Some(offsets) = from_array(&object)? {
            return Ok(Self(offsets));
        }
        let text = object.is_instance_of::<PyBytes>()
            || object.is_instance_of::<PyByteArray>()
            || object.is_instance_of::<PyString>();
        let Some(items) = object.try_iter().ok().filter(|_| !text) else {
            let text = format!(
                "offsets is {}; a sequence of ints is expected",
                type_name(&object)
            );
            return Err(exception(object.py(), ErrorKind::Argument, text));
        };
        let mut offsets = Vec::with_capacity(object.len().unwrap_or(0).min(RESERVED_MAX));
        for (position, item) in items.enumerate() {
            let item = item?;
            offsets.push(
                item.extract::<u64>()
                    .map_err(|_| wrong(&object, position, &shown(&item)))?,
            );
        }
        Ok(Self(offsets))
    }
}

/// The offsets of a buffer of 64-bit ints; none when `object` is something else.
fn from_array(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    let py = object.py();
    let Some(array) = PyUntypedBuffer::get(object)
        .ok()
        .filter(|held| held.dimensions() == 1)
    else {
        return Ok(None);
    };
    if let Ok(array) = array.as_typed::<u64>() {
        return array.to_vec(py).map(Some);
    }
    let Ok(array) = array.as_typed::<i64>() else {
        return Ok(None);
    };
    let signed: &PyBuffer<i64> = array;
    signed
        .to_vec(py)?
        .into_iter()
        .enumerate()
        .map(|(position, value)| u64::try_from(value).map_err(|_| wrong(object, position, &value)))
        .collect::<PyResult<_>>()
        .map(Some)
}

fn wrong(object: &Bound<'_, PyAny>, position: usize, value: &dyn core::fmt::Display) -> PyErr {
    let text = format!(
        "offsets[{position}] is {value}; a byte offset, an int from 0 to 2**64 - 1, is expected"
    );
    exception(object.py(), ErrorKind::Argument, text)
}
