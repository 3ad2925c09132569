//! Manifests of namespaces, and the digests in them, as Python sees them.

use std::sync::Mutex;

use kvstrata_core::namespace;
use kvstrata_core::sys::sync::lock;
use pyo3::prelude::*;

use crate::arguments::{Deferred, bytes};
use crate::error::raised;
use crate::json::Manifest;

/// The blake3 digest of bytes given piece by piece.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Fingerprint {
    digest: Mutex<namespace::Fingerprint>,
}

#[pymethods]
impl Fingerprint {
    #[new]
    fn new() -> Self {
        Self {
            digest: Mutex::default(),
        }
    }

    /// Adds the next bytes.
    #[pyo3(signature = (data: "bytes"))]
    fn update(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let data = bytes("data", data)?.as_bytes();
        py.detach(|| lock(&self.digest).update(data));
        Ok(())
    }

    /// The digest of all bytes so far: 64 lower-case hexadecimal digits.
    fn hexdigest(&self) -> String {
        lock(&self.digest).hexadecimal()
    }
}

/// Path of a field, and its canonical text on either side.
type Difference = (String, Option<String>, Option<String>);

fn stored(py: Python<'_>, manifest: Manifest) -> PyResult<namespace::Manifest> {
    namespace::Manifest::from_fields(manifest.0).map_err(|error| raised(py, &error))
}

/// The digest of a whole manifest as ``namespace.json`` has it: 64 hexadecimal digits.
///
/// Raises ``ConfigError`` for what cannot be a manifest.
#[pyfunction]
#[pyo3(text_signature = "(manifest)")]
pub(crate) fn manifest_digest(py: Python<'_>, manifest: Deferred<Manifest>) -> PyResult<String> {
    Ok(stored(py, manifest.get()?)?.digest().to_string())
}

/// The fields in which two whole manifests differ: path, canonical text in ``a``, and in ``b``.
///
/// ``None`` stands for a field that is absent. Empty exactly when the digests are equal. Raises
/// ``ConfigError`` for what cannot be a manifest.
#[pyfunction]
#[pyo3(text_signature = "(a, b)")]
pub(crate) fn manifest_differences(
    py: Python<'_>,
    a: Deferred<Manifest>,
    b: Deferred<Manifest>,
) -> PyResult<Vec<Difference>> {
    let differences = stored(py, a.get()?)?.differences(&stored(py, b.get()?)?);
    Ok(differences
        .into_iter()
        .map(|found| (found.field, found.ours, found.theirs))
        .collect())
}
