//! Simple values that know the name of their argument.

use core::marker::PhantomData;
use core::time::Duration;

use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBoolMethods, PyString};
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

/// What an argument may be.
pub(crate) trait Form {
    /// Its value here.
    type Value;
    /// What is expected, for messages.
    const EXPECTED: &'static str;
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr;

    /// The value of an object; none if it is not of this form.
    fn read(object: &Bound<'_, PyAny>) -> Option<Self::Value>;
}

/// A value of form `F` that knows the name `N` of its argument.
pub(crate) struct Argument<N, F: Form> {
    pub(crate) value: F::Value,
    name: PhantomData<N>,
}

impl<N, F: Form> Argument<N, F> {
    pub(super) const fn of(value: F::Value) -> Self {
        Self {
            value,
            name: PhantomData,
        }
    }
}

impl<N: Named, F: Form> FromPyObject<'_, '_> for Argument<N, F> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = F::TYPE;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        F::read(&object).map(Self::of).ok_or_else(|| {
            let text = format!(
                "{} is {}; {} is expected",
                N::NAME,
                shown(&object),
                F::EXPECTED
            );
            exception(object.py(), N::KIND, text)
        })
    }
}

/// A number that is no `bool`.
pub(super) fn number<'py, T: FromPyObjectOwned<'py>>(object: &Bound<'py, PyAny>) -> Option<T> {
    let number = object.extract().ok();
    number.filter(|_| !object.is_instance_of::<PyBool>())
}

/// See [`Text`].
pub(crate) enum TextForm {}
/// A `str`.
pub(crate) type Text<N> = Argument<N, TextForm>;

impl Form for TextForm {
    type Value = String;
    const EXPECTED: &'static str = "a str";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "str");

    fn read(object: &Bound<'_, PyAny>) -> Option<String> {
        let text = object.cast::<PyString>().ok()?;
        text.to_str().ok().map(str::to_owned)
    }
}

/// See [`Flag`].
pub(crate) enum FlagForm {}
/// A `bool`.
pub(crate) type Flag<N> = Argument<N, FlagForm>;

impl Form for FlagForm {
    type Value = bool;
    const EXPECTED: &'static str = "True or False";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "bool");

    fn read(object: &Bound<'_, PyAny>) -> Option<bool> {
        object.cast::<PyBool>().ok().map(PyBoolMethods::is_true)
    }
}

/// Stands for every longer time: 136 years, which a clock's arithmetic still takes.
const FOREVER: Duration = Duration::from_secs(0xffff_ffff);

/// See [`Seconds`].
pub(crate) enum SecondsForm {}
/// A duration in seconds, zero or more; infinity is [`FOREVER`].
pub(crate) type Seconds<N> = Argument<N, SecondsForm>;

impl Form for SecondsForm {
    type Value = Duration;
    const EXPECTED: &'static str = "a number of seconds, 0 or more,";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "float");

    fn read(object: &Bound<'_, PyAny>) -> Option<Duration> {
        let seconds = number::<f64>(object).filter(|seconds| *seconds >= 0.0)?;
        Some(duration(seconds))
    }
}

/// See [`PositiveSeconds`].
pub(crate) enum PositiveSecondsForm {}
/// A duration in seconds, more than zero; infinity is [`FOREVER`].
pub(crate) type PositiveSeconds<N> = Argument<N, PositiveSecondsForm>;

impl Form for PositiveSecondsForm {
    type Value = Duration;
    const EXPECTED: &'static str = "a number of seconds, more than 0,";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "float");

    fn read(object: &Bound<'_, PyAny>) -> Option<Duration> {
        let seconds = number::<f64>(object).filter(|seconds| *seconds > 0.0)?;
        Some(duration(seconds))
    }
}

/// `seconds` of 0 or more.
fn duration(seconds: f64) -> Duration {
    let given = Duration::try_from_secs_f64(seconds);
    given.map_or(FOREVER, |given| given.min(FOREVER))
}

/// See [`Count`].
pub(crate) enum CountForm {}
/// An `int` from 1 to 2**64 - 1.
pub(crate) type Count<N> = Argument<N, CountForm>;

impl Form for CountForm {
    type Value = usize;
    const EXPECTED: &'static str = "an int from 1 to 2**64 - 1";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "int");

    fn read(object: &Bound<'_, PyAny>) -> Option<usize> {
        number(object).filter(|count| *count > 0)
    }
}

/// See [`Probability`].
pub(crate) enum ProbabilityForm {}
/// A `float` from 0 to 1.
pub(crate) type Probability<N> = Argument<N, ProbabilityForm>;

impl Form for ProbabilityForm {
    type Value = f32;
    const EXPECTED: &'static str = "a probability from 0 to 1";
    #[cfg(feature = "stubs")]
    const TYPE: PyStaticExpr = type_hint_identifier!("builtins", "float");

    fn read(object: &Bound<'_, PyAny>) -> Option<f32> {
        number(object).filter(|value| (0.0..=1.0).contains(value))
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
