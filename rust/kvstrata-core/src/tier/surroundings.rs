//! What lies around a tier: the arena, jobs, counters, log lines, and where it meets the machine.

use core::fmt;
use core::time::Duration;

use crate::buffer::Arena;
use crate::error::Result;
use crate::io::Engine;
use crate::job::{JobKind, JobTable, Settlement};
use crate::metrics::{Metrics, count};
use crate::notice::Notices;
use crate::sys::clock::Clock;
use crate::sys::fs::Descriptors;
use crate::sys::sync::{Arc, Mutex, Weak, try_lock};
use crate::tier::circuit::CircuitLimits;
use crate::tier::request::Request;
use crate::tier::seams::{ProbeRoot, Seams, StartEngine};

/// What a tier shares with its opener and its caller.
#[derive(Clone)]
pub(crate) struct Surroundings {
    /// The caller's slots.
    pub(crate) arena: Arc<Arena>,
    /// All jobs.
    pub(crate) jobs: Arc<JobTable>,
    /// All counters.
    pub(crate) metrics: Arc<Metrics>,
    /// All log lines.
    pub(crate) notices: Arc<Notices>,
    /// The time.
    pub(crate) clock: Arc<dyn Clock>,
    /// Tells what the root can do.
    pub(crate) probe_root: ProbeRoot,
    /// Makes the I/O engine.
    pub(crate) start_engine: StartEngine,
    /// When a failing device is given up.
    pub(crate) circuit: CircuitLimits,
    /// What a forked child is to close.
    pub(crate) descriptors: Arc<Descriptors>,
    /// The engines that were started, for a forked child to leave.
    pub(crate) engines: Arc<Mutex<Vec<Weak<dyn Engine>>>>,
}

impl Surroundings {
    /// Around a tier that meets the machine at `seams`.
    ///
    /// # Errors
    /// When the descriptor that tells of results cannot be made.
    pub(super) fn new(arena: Arc<Arena>, seams: Seams) -> Result<Self> {
        let Seams {
            clock,
            probe_root,
            start_engine,
            circuit,
        } = seams;
        Ok(Self {
            arena,
            jobs: Arc::new(JobTable::new(Arc::clone(&clock))?),
            metrics: Arc::new(Metrics::default()),
            notices: Arc::new(Notices::new(Arc::clone(&clock))),
            clock,
            probe_root,
            start_engine,
            circuit,
            descriptors: Descriptors::new(),
            engines: Arc::default(),
        })
    }

    /// In a forked child: closes the child's copies of all descriptors, and leaves the engines to
    /// the parent.
    pub(super) fn leave_to_parent(&self) {
        self.descriptors.close_in_child();
        // Another thread may have had the lock, for an instant, while it started the engine.
        for engine in try_lock(&self.engines)
            .into_iter()
            .flat_map(|engines| engines.clone())
        {
            if let Some(engine) = engine.upgrade() {
                engine.leave_to_parent();
                // The parent's threads, which this handle would wait for, are not in this process.
                core::mem::forget(engine);
            }
        }
    }

    /// Counts the outcomes of keys of a job; returns the bytes of their slots.
    pub(super) fn count_settled(&self, request: &Request, settlements: &[Settlement]) -> u64 {
        let metrics = &self.metrics;
        let mut bytes = 0_u64;
        for settlement in settlements {
            metrics.count(request.kind, settlement.outcome);
            let item = request.items.get(settlement.position);
            let row_bytes = item.map_or(0, |item| item.row_bytes);
            bytes = bytes.saturating_add(count(row_bytes));
            match request.kind {
                JobKind::Store => metrics.bytes_stored.add(settlement.bytes),
                JobKind::Load => metrics.bytes_loaded.add(settlement.bytes),
            }
        }
        bytes
    }

    /// Time since the call that began a job. Its deadline is `limit` later than the call.
    pub(super) fn age(&self, request: &Request, limit: Duration) -> Duration {
        let now = self.clock.now();
        let left = request.deadline.saturating_duration_since(now);
        let late = now.saturating_duration_since(request.deadline);
        limit.saturating_sub(left).saturating_add(late)
    }

    /// Counts how long a job took whose deadline was `limit` later than its call.
    pub(super) fn note_end(&self, request: &Request, limit: Duration) {
        let latency = &self.metrics.latency;
        match request.kind {
            JobKind::Load => latency.load.record(self.age(request, limit)),
            JobKind::Store => latency.store.record(self.age(request, limit)),
        }
    }
}

impl fmt::Debug for Surroundings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Surroundings")
            .field("jobs", &self.jobs)
            .finish_non_exhaustive()
    }
}
