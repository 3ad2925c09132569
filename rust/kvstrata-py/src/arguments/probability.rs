//! A probability that knows the name of its argument.

use core::marker::PhantomData;

use pyo3::prelude::*;
use pyo3::types::PyBool;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier};

use super::{Named, shown};
use crate::error::exception;

/// A `float` from 0 to 1.
pub(crate) struct Probability<N> {
    pub(crate) value: f32,
    name: PhantomData<N>,
}

impl<N: Named> FromPyObject<'_, '_> for Probability<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "float");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let value = object
            .extract::<f32>()
            .ok()
            .filter(|value| (0.0..=1.0).contains(value) && !object.is_instance_of::<PyBool>());
        match value {
            Some(value) => Ok(Self {
                value,
                name: PhantomData,
            }),
            None => Err(exception(
                object.py(),
                N::KIND,
                format!(
                    "{} is {}; a probability from 0 to 1 is expected",
                    N::NAME,
                    shown(&object)
                ),
            )),
        }
    }
}
