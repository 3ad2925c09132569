//! Where a tier lives: a directory or a bucket.

use std::path::PathBuf;

use kvstrata_core::config;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::object::Location;
use pyo3::prelude::*;
use pyo3::types::PyString;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};

use super::shown;
use crate::error::{exception, refused};

/// A URL, a path as `str`, or a path object.
pub(crate) enum Root {
    /// `file://` or a path.
    Directory(PathBuf),
    /// `s3://`, `gs://`, `az://` or `memory://`.
    Bucket(Location),
}

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
            let bucket = Location::parse(text).map_err(|error| refused(py, &error))?;
            return match bucket {
                Some(location) => Ok(Self::Bucket(location)),
                None => config::parse_url(text)
                    .map(Self::Directory)
                    .map_err(|error| refused(py, &error)),
            };
        }
        object
            .extract::<PathBuf>()
            .map(Self::Directory)
            .map_err(|_| {
                let text = format!("url is {}; a str or a path is expected", shown(&object));
                exception(py, ErrorKind::Config, text)
            })
    }
}
