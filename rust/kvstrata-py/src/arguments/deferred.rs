//! An argument whose refusal the call raises itself.

#[cfg(feature = "stubs")]
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;

use super::named::{Argument, Form};

/// What was taken of an argument. `PyO3` adds a note to what is raised while it takes arguments
/// ("while processing 'url'"), which the refusals here, each with its argument's name, do not need.
pub(crate) struct Deferred<T>(PyResult<T>);

impl<T> Deferred<T> {
    /// The argument.
    ///
    /// # Errors
    /// Its refusal.
    pub(crate) fn get(self) -> PyResult<T> {
        self.0
    }
}

impl<N, F: Form> Deferred<Argument<N, F>> {
    /// A default.
    pub(crate) const fn of(value: F::Value) -> Self {
        Self(Ok(Argument::of(value)))
    }

    /// The value of the argument.
    ///
    /// # Errors
    /// Its refusal.
    pub(crate) fn value(self) -> PyResult<F::Value> {
        self.0.map(|argument| argument.value)
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>> FromPyObject<'a, 'py> for Deferred<T> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = T::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(T::extract(object)))
    }
}

/// The value of an argument that may be left out.
///
/// # Errors
/// Its refusal.
pub(crate) fn optional<N, F: Form>(
    given: Option<Deferred<Argument<N, F>>>,
) -> PyResult<Option<F::Value>> {
    given.map(Deferred::value).transpose()
}
