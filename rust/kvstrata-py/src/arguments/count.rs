//! A whole number that knows the name of its argument.

use core::marker::PhantomData;

use pyo3::prelude::*;
use pyo3::types::PyBool;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier};

use super::{Named, shown};
use crate::error::exception;

/// An `int` from 1 on.
pub(crate) struct Count<N> {
    pub(crate) value: usize,
    name: PhantomData<N>,
}

impl<N: Named> FromPyObject<'_, '_> for Count<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "int");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let value = object
            .extract::<usize>()
            .ok()
            .filter(|value| *value > 0 && !object.is_instance_of::<PyBool>());
        match value {
            Some(value) => Ok(Self {
                value,
                name: PhantomData,
            }),
            None => Err(exception(
                object.py(),
                N::KIND,
                format!(
                    "{} is {}; an int from 1 on is expected",
                    N::NAME,
                    shown(&object)
                ),
            )),
        }
    }
}
