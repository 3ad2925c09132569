//! An argument that was given or not, where the two differ and `None` is no value.

#[cfg(feature = "stubs")]
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;

use super::Deferred;

/// `Some` when the caller wrote the argument.
pub(crate) struct Given<T>(Option<Deferred<T>>);

impl<T> Given<T> {
    /// The default.
    pub(crate) const ABSENT: Self = Self(None);

    /// The argument, if it was written.
    ///
    /// # Errors
    /// Its refusal.
    pub(crate) fn get(self) -> PyResult<Option<T>> {
        self.0.map(Deferred::get).transpose()
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>> FromPyObject<'a, 'py> for Given<T> {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = T::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Deferred::extract(object).map(|taken| Self(Some(taken)))
    }
}
