//! `kvstrata._native`: converts, detaches, converts. No logic lives here.
//!
//! The habits of this layer (one file per noun, arguments as own types, one place that maps errors,
//! a module that does not use the GIL) follow obstore's.

mod arena;
mod arguments;
mod cache_policy;
mod cpu_tier;
mod environment;
mod error;
mod gc;
mod handle;
mod job_result;
mod json;
mod namespace;
mod notices;
mod open;
mod requests;
mod simulate;
mod tier;

/// The Rust core of kvstrata.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::cache_policy::{CacheOrder, LruOrder};
    #[pymodule_export]
    use crate::cpu_tier::CpuTier;
    #[pymodule_export]
    use crate::gc::collect_garbage;
    #[pymodule_export]
    use crate::job_result::JobResult;
    #[pymodule_export]
    use crate::namespace::{Fingerprint, manifest_differences, manifest_digest};
    #[pymodule_export]
    use crate::open::open_tier;
    #[pymodule_export]
    use crate::requests::RequestBook;
    #[pymodule_export]
    use crate::simulate::Trace;
    #[pymodule_export]
    use crate::tier::Tier;

    /// Version of this build.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name Python gives it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn initialise(py: Python<'_>) -> PyResult<()> {
        crate::handle::close_at_exit(py)?;
        crate::handle::leave_roots_after_fork(py)
    }
}
