//! An engine that begins with nothing before there is much to do.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvstrata_core::io::{
    Alignment, Direction, Engine, EngineCounters, Operation, OperationId, QueueDepth,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::File;

/// Wraps an engine; writes wait until they move so many bytes together, and then all start at once.
/// It gathers once: what comes later passes.
#[derive(Debug)]
pub struct Gathering {
    engine: Arc<dyn Engine>,
    bytes: u64,
    gathered: Mutex<Option<Vec<Operation>>>,
}

impl Gathering {
    /// Gathers writes of `bytes` bytes in all before `engine` gets them.
    pub fn new(engine: Arc<dyn Engine>, bytes: u64) -> Self {
        Self {
            engine,
            bytes,
            gathered: Mutex::new(Some(Vec::new())),
        }
    }

    /// What is to be started now.
    fn released(&self, operations: Vec<Operation>) -> Vec<Operation> {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = &mut *gathered else {
            return operations;
        };
        let (writes, mut others): (Vec<_>, Vec<_>) = operations
            .into_iter()
            .partition(|operation| operation.direction == Direction::Write);
        waiting.extend(writes);
        if waiting.iter().map(Operation::bytes).sum::<u64>() >= self.bytes {
            let mut writes = gathered.take().unwrap_or_default();
            // The first ones are not to end while the others' checksums are computed.
            for write in &mut writes {
                write.begin(SystemClock.now());
            }
            others.extend(writes);
        }
        others
    }
}

impl Engine for Gathering {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn submit(&self, operations: Vec<Operation>) {
        self.engine.submit(self.released(operations));
    }

    fn expire(&self, now: Instant) {
        self.engine.expire(now);
    }

    fn guard(&self, file: &File) {
        self.engine.guard(file);
    }

    fn is_started(&self, operation: OperationId) -> bool {
        self.engine.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        self.engine.queue()
    }

    fn counters(&self) -> EngineCounters {
        self.engine.counters()
    }

    fn requirements(&self) -> Alignment {
        self.engine.requirements()
    }

    fn poisoned(&self) -> bool {
        self.engine.poisoned()
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.engine.shutdown(timeout)
    }
}
