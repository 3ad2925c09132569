//! The payload bytes of a row per group.

use std::collections::BTreeMap;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::key::GroupId;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyMapping, PyTuple};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};

use super::shown;
use crate::error::exception;

/// A mapping of group id to bytes; an int `n` is short for `{0: n}`.
pub(crate) struct RowBytes(pub(crate) BTreeMap<GroupId, u64>);

impl FromPyObject<'_, '_> for RowBytes {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("builtins", "int"),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Mapping"),
            type_hint_identifier!("builtins", "int"),
            type_hint_identifier!("builtins", "int")
        )
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let refuse = |text: String| exception(object.py(), ErrorKind::Config, text);
        if object.is_instance_of::<PyInt>() {
            return Ok(Self(BTreeMap::from([(
                GroupId(0),
                bytes(&object, "row_bytes")?,
            )])));
        }
        let Ok(mapping) = object.cast::<PyMapping>() else {
            return Err(refuse(format!(
                "row_bytes is {}; a dict of group id to bytes, or an int, is expected",
                shown(&object)
            )));
        };
        let mut groups = BTreeMap::new();
        for item in mapping.items()? {
            let (group, value) = item
                .cast::<PyTuple>()?
                .extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            let id = group
                .extract::<u32>()
                .ok()
                .filter(|_| !group.is_instance_of::<PyBool>());
            let Some(id) = id else {
                return Err(refuse(format!(
                    "row_bytes has the key {}; a group id, an int from 0 to 2**32 - 1, is expected",
                    shown(&group)
                )));
            };
            groups.insert(GroupId(id), bytes(&value, &format!("row_bytes[{id}]"))?);
        }
        Ok(Self(groups))
    }
}

fn bytes(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    match value
        .extract::<u64>()
        .ok()
        .filter(|_| !value.is_instance_of::<PyBool>())
    {
        Some(bytes) => Ok(bytes),
        None => Err(exception(
            value.py(),
            ErrorKind::Config,
            format!(
                "{name} is {}; an int of bytes from 1 to 2**30 is expected",
                shown(value)
            ),
        )),
    }
}
