//! Starting the engine that a probe has chosen.

use super::file::FileCache;
use super::threads::Threads;
use super::uring::Uring;
use super::{Capabilities, CompletionSink, Engine};
use crate::error::Result;
use crate::sys::clock::Clock;
use crate::sys::sync::Arc;

/// Starts the engine for files of the root with these capabilities. A ring that is refused although
/// it was not when it was tried is an error where it was asked for by name; otherwise threads are
/// started, and [`Engine::name`] tells.
///
/// # Errors
/// [`crate::error::ErrorKind::Unavailable`] when there is neither.
pub fn start(
    capabilities: &Capabilities,
    files: Arc<FileCache>,
    clock: Arc<dyn Clock>,
    sink: CompletionSink,
) -> Result<Arc<dyn Engine>> {
    if capabilities.io_backend == "uring" {
        let parts = (Arc::clone(&files), Arc::clone(&clock), Arc::clone(&sink));
        match Uring::start(capabilities, parts.0, parts.1, parts.2) {
            Ok(ring) => return Ok(Arc::new(ring)),
            Err(error) if capabilities.is_named => return Err(error),
            Err(_) => {}
        }
    }
    Ok(Arc::new(Threads::start(capabilities, files, clock, sink)?))
}
