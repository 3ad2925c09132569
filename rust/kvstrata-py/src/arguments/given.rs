//! An argument that was given or not, where the two differ and `None` is no value.

#[cfg(feature = "stubs")]
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;

/// `Some` when the caller wrote the argument.
pub(crate) struct Given<T>(pub(crate) Option<T>);

impl<T> Given<T> {
    /// The default.
    pub(crate) const ABSENT: Self = Self(None);
}

impl<T> Default for Given<T> {
    fn default() -> Self {
        Self::ABSENT
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Given<T> {
    type Error = T::Error;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = T::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        T::extract(object).map(|value| Self(Some(value)))
    }
}
