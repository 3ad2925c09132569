//! Where a tier meets the machine.

use core::fmt;

use crate::error::Result;
use crate::io::file::FileCache;
use crate::io::probe::probe;
use crate::io::{Capabilities, CompletionSink, Engine};
use crate::sys::clock::{Clock, SystemClock};
use crate::sys::fs::Directory;
use crate::sys::sync::Arc;
use crate::tier::circuit::CircuitLimits;

/// Makes the engine that moves a tier's bytes.
pub type StartEngine = Arc<
    dyn Fn(&Capabilities, Arc<FileCache>, Arc<dyn Clock>, CompletionSink) -> Result<Arc<dyn Engine>>
        + Send
        + Sync,
>;

/// Finds out what a root can do, for the I/O backend that was asked for.
pub type ProbeRoot = Arc<dyn Fn(&Directory, &str) -> Result<Capabilities> + Send + Sync>;

/// Where a tier meets the machine; tests put doubles here.
#[derive(Clone)]
pub struct Seams {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// What the root can do.
    pub probe_root: ProbeRoot,
    /// The engine.
    pub start_engine: StartEngine,
    /// When a failing device is given up, and for how long.
    pub circuit: CircuitLimits,
}

impl Default for Seams {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            probe_root: Arc::new(probe),
            start_engine: Arc::new(crate::io::start),
            circuit: CircuitLimits::default(),
        }
    }
}

impl fmt::Debug for Seams {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Seams")
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}
