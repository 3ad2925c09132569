//! Where a tier lives.

use std::path::PathBuf;

use kvstrata_core::config;
use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;
use pyo3::types::PyString;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};

use super::shown;
use crate::error::{exception, refused};

/// A `file://` URL, a path as `str`, or a path object.
pub(crate) struct Root(pub(crate) PathBuf);

impl FromPyObject<'_, '_> for Root {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("builtins", "str"),
        type_hint_subscript!(
            type_hint_identifier!("os", "PathLike"),
            type_hint_identifier!("builtins", "str")
        )
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if let Ok(text) = object.cast::<PyString>()
            && let Ok(text) = text.to_str()
        {
            return config::parse_url(text)
                .map(Self)
                .map_err(|error| refused(py, &error));
        }
        object.extract::<PathBuf>().map(Self).map_err(|_| {
            let text = format!("url is {}; a str or a path is expected", shown(&object));
            exception(py, ErrorKind::Config, text)
        })
    }
}
