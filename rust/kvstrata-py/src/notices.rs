//! The core's rare log lines, handed to Python's `logging` after a call.

use kvstrata_core::notice::{Level, Notice};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Logs `notices` as the logger `kvstrata`. A handler that raises does not disturb the call: what it
/// raised goes to `sys.unraisablehook`.
pub(crate) fn log(py: Python<'_>, notices: Vec<Notice>) {
    for notice in notices {
        if let Err(error) = write(py, &notice) {
            error.write_unraisable(py, None);
        }
    }
}

fn write(py: Python<'_>, notice: &Notice) -> PyResult<()> {
    const INFO: u8 = 20;
    const WARNING: u8 = 30;
    const ERROR: u8 = 40;
    let logger = LOGGER.get_or_try_init(py, || {
        py.import("logging")?
            .call_method1("getLogger", ("kvstrata",))
            .map(Bound::unbind)
    })?;
    let level = match notice.level {
        Level::Info => INFO,
        Level::Warning => WARNING,
        Level::Error => ERROR,
    };
    logger
        .bind(py)
        .call_method1("log", (level, "kvstrata: %s", notice.text.as_str()))
        .map(drop)
}
