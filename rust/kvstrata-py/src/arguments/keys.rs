//! The keys of a call.

use kvstrata_core::error::ErrorKind;
use kvstrata_core::key::Key;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};

use super::type_name;
use crate::error::exception;

/// Most places reserved for what `len()` promises; a longer sequence grows as it is read.
pub(crate) const RESERVED_MAX: usize = 65_536;

/// A sequence of keys, each `bytes` or another contiguous buffer of bytes.
pub(crate) struct Keys(pub(crate) Vec<Key>);

impl FromPyObject<'_, '_> for Keys {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_union!(
            type_hint_identifier!("builtins", "bytes"),
            type_hint_identifier!("builtins", "bytearray"),
            type_hint_identifier!("builtins", "memoryview")
        )
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let single = object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyString>();
        let Some(items) = object.try_iter().ok().filter(|_| !single) else {
            let text = format!(
                "keys is {}; a sequence of keys, each of type bytes, is expected",
                type_name(&object)
            );
            return Err(exception(object.py(), ErrorKind::Argument, text));
        };
        let mut keys = Vec::with_capacity(object.len().unwrap_or(0).min(RESERVED_MAX));
        for (position, item) in items.enumerate() {
            keys.push(key(&item?, position)?);
        }
        Ok(Self(keys))
    }
}

/// Sequences of keys.
pub(crate) struct Groups(pub(crate) Vec<Keys>);

impl FromPyObject<'_, '_> for Groups {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = <Vec<Keys> as FromPyObject<'_, '_>>::INPUT_TYPE;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let Ok(groups) = object.try_iter() else {
            let text = format!(
                "groups is {}; a sequence of sequences of keys is expected",
                type_name(&object)
            );
            return Err(exception(object.py(), ErrorKind::Argument, text));
        };
        groups
            .map(|group| group?.extract())
            .collect::<PyResult<Vec<Keys>>>()
            .map(Self)
    }
}

fn key(item: &Bound<'_, PyAny>, position: usize) -> PyResult<Key> {
    let py = item.py();
    let made = if let Ok(bytes) = item.cast::<PyBytes>() {
        Key::new(bytes.as_bytes())
    } else if let Some(bytes) = PyBuffer::<u8>::get(item)
        .ok()
        .and_then(|held| held.to_vec(py).ok())
    {
        Key::new(&bytes)
    } else {
        let text = format!(
            "keys[{position}] is {}; bytes are expected",
            type_name(item)
        );
        return Err(exception(py, ErrorKind::Argument, text));
    };
    made.map_err(|error| exception(py, error.kind(), format!("keys[{position}]: {error}")))
}
