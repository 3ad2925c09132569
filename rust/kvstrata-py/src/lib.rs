//! `kvstrata._native`: converts, detaches, converts. No logic lives here.
//!
//! The habits of this layer (one file per noun, arguments as own types, one place that maps errors,
//! a module that does not use the GIL) follow obstore's.

mod arena;
mod arguments;
mod error;
mod handle;
mod job_result;
mod json;
mod notices;
#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments are made for one call each"
)]
mod tier;

/// The Rust core of kvstrata.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::job_result::JobResult;
    #[pymodule_export]
    use crate::tier::Tier;
    #[pymodule_export]
    use crate::tier::open_tier;

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
