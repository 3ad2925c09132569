//! An engine that forgets to keep locks: what shows that a test of them can fail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::io::{Alignment, Engine, EngineCounters, Operation, OperationId, QueueDepth};

/// Wraps an engine; [`Engine::guard`] does nothing, as if the lock were any other file.
#[derive(Debug)]
pub struct Unguarded(pub Arc<dyn Engine>);

impl Engine for Unguarded {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn submit(&self, operations: Vec<Operation>) {
        self.0.submit(operations);
    }

    fn expire(&self, now: Instant) {
        self.0.expire(now);
    }

    fn is_started(&self, operation: OperationId) -> bool {
        self.0.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        self.0.queue()
    }

    fn counters(&self) -> EngineCounters {
        self.0.counters()
    }

    fn requirements(&self) -> Alignment {
        self.0.requirements()
    }

    fn poisoned(&self) -> bool {
        self.0.poisoned()
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.0.shutdown(timeout)
    }
}
