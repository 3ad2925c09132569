//! A number of bytes, or a part of a file system, as text or int.

use core::marker::PhantomData;

use kvstrata_core::config::{self, Size};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_union};

use super::{Named, shown};
use crate::error::exception;

/// `"10GiB"`, `"80%"` or an int of bytes.
pub(crate) struct SizeText<N> {
    pub(crate) value: Size,
    name: PhantomData<N>,
}

impl<N: Named> FromPyObject<'_, '_> for SizeText<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("builtins", "str"),
        type_hint_identifier!("builtins", "int")
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let refuse = |why: String| exception(object.py(), N::KIND, format!("{}: {why}", N::NAME));
        if let Ok(text) = object.cast::<PyString>() {
            let value = config::parse_size(N::NAME, &text.to_string_lossy())
                .map_err(|error| exception(object.py(), N::KIND, error.to_string()))?;
            return Ok(Self {
                value,
                name: PhantomData,
            });
        }
        let is_int = object.is_instance_of::<PyInt>() && !object.is_instance_of::<PyBool>();
        match object.extract::<u64>().ok().filter(|_| is_int) {
            Some(bytes) => Ok(Self {
                value: Size::Bytes(bytes),
                name: PhantomData,
            }),
            None => Err(refuse(format!(
                "{} is not a size; a str such as \"10GiB\" or \"80%\", or an int of bytes from 0 to \
                 2**64 - 1, is expected",
                shown(&object)
            ))),
        }
    }
}
