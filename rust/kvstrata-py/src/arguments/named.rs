//! Simple values that know the name of their argument.

use core::marker::PhantomData;
use core::time::Duration;

use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier};

use super::{shown, type_name};
use crate::error::exception;

/// Name of an argument and the kind of error a wrong value is.
pub(crate) trait Named {
    /// As Python writes it.
    const NAME: &'static str;
    /// Kind of the error.
    const KIND: ErrorKind;
}

/// A `str`.
pub(crate) struct Text<N> {
    pub(crate) value: String,
    name: PhantomData<N>,
}

impl<N> Text<N> {
    /// A default.
    pub(crate) fn new(value: &str) -> Self {
        Self {
            value: value.to_owned(),
            name: PhantomData,
        }
    }
}

impl<N: Named> FromPyObject<'_, '_> for Text<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "str");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object
            .cast::<PyString>()
            .ok()
            .and_then(|text| text.to_str().ok().map(str::to_owned))
        {
            Some(value) => Ok(Self {
                value,
                name: PhantomData,
            }),
            None => Err(exception(
                object.py(),
                N::KIND,
                format!("{} is {}; a str is expected", N::NAME, shown(&object)),
            )),
        }
    }
}

/// A `bool`.
pub(crate) struct Flag<N> {
    pub(crate) value: bool,
    name: PhantomData<N>,
}

impl<N> Flag<N> {
    /// A default.
    pub(crate) const TRUE: Self = Self {
        value: true,
        name: PhantomData,
    };
    /// A default.
    pub(crate) const FALSE: Self = Self {
        value: false,
        name: PhantomData,
    };
}

impl<N: Named> FromPyObject<'_, '_> for Flag<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "bool");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object.cast::<PyBool>() {
            Ok(flag) => Ok(Self {
                value: flag.is_true(),
                name: PhantomData,
            }),
            Err(_) => Err(exception(
                object.py(),
                N::KIND,
                format!(
                    "{} is {}; True or False is expected",
                    N::NAME,
                    shown(&object)
                ),
            )),
        }
    }
}

/// Stands for every longer time: 136 years, which a clock's arithmetic still takes.
const FOREVER: Duration = Duration::from_secs(0xffff_ffff);

/// A duration in seconds, zero or more; infinity is [`FOREVER`].
pub(crate) struct Seconds<N> {
    pub(crate) value: Duration,
    name: PhantomData<N>,
}

impl<N> Seconds<N> {
    /// A default.
    pub(crate) const fn new(seconds: u64) -> Self {
        Self {
            value: Duration::from_secs(seconds),
            name: PhantomData,
        }
    }
}

impl<N: Named> FromPyObject<'_, '_> for Seconds<N> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "float");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let number = object
            .extract::<f64>()
            .ok()
            .filter(|_| !object.is_instance_of::<PyBool>());
        match number {
            Some(seconds) if seconds >= 0.0 => {
                let value = Duration::try_from_secs_f64(seconds)
                    .map_or(FOREVER, |given| given.min(FOREVER));
                Ok(Self {
                    value,
                    name: PhantomData,
                })
            }
            _ => Err(exception(
                object.py(),
                N::KIND,
                format!(
                    "{} is {}; a number of seconds, 0 or more, is expected",
                    N::NAME,
                    shown(&object)
                ),
            )),
        }
    }
}

/// The number a caller gives a job.
pub(crate) struct JobId(pub(crate) u64);

impl FromPyObject<'_, '_> for JobId {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "SupportsIndex");

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        object.extract::<u64>().map(Self).map_err(|_| {
            let text = format!(
                "job_id is {} ({}); an int from 0 to 2**64 - 1 is expected",
                shown(&object),
                type_name(&object)
            );
            exception(object.py(), ErrorKind::Argument, text)
        })
    }
}
