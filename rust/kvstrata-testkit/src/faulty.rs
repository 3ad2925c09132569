//! An engine that does to chosen operations what disks and kernels do.

use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvstrata_core::io::{
    Alignment, Completion, CompletionSink, Engine, EngineCounters, Failure, Operation, OperationId,
    Prelude, QueueDepth, Segment,
};
use kvstrata_core::sys::fs::File;

/// What happens to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing out of the ordinary.
    None,
    /// It is not done and fails (`EIO`, `ENOSPC`, ...).
    Fail(Failure),
    /// It is done in full and reported as failed.
    FailAfter(Failure),
    /// Only its first bytes (this many) are moved, then it fails.
    Tear(usize, Failure),
    /// It is done; its completion comes after that of this many operations more.
    Delay(usize),
    /// It is done; its completion comes with [`FaultyEngine::release`], if ever.
    Hold,
    /// It is never started; its deadline, a shutdown or [`FaultyEngine::release`] ends the wait.
    Stall,
    /// Its engine panics before it starts it.
    Panic,
}

/// Chooses the fault of an operation when it is submitted.
pub type FaultPlan = Box<dyn FnMut(&Operation) -> Fault + Send>;

/// Wraps an engine; see [`Fault`]. Keeps the contract of [`Engine`]: each operation completes at
/// most once, on threads of the engines, and memory is kept until then.
pub struct FaultyEngine {
    inner: Arc<dyn Engine>,
    shared: Arc<Shared>,
    plan: Mutex<FaultPlan>,
}

struct Shared {
    state: Mutex<State>,
    out: Mutex<Sender<Completion>>,
}

#[derive(Default)]
struct State {
    faults: HashMap<OperationId, Fault>,
    cut_off: HashMap<OperationId, Vec<Segment>>,
    delayed: Vec<(usize, Completion)>,
    held: Vec<Completion>,
    stalled: Vec<Operation>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn without_start(operation: Operation, failure: Failure) -> Completion {
    Completion {
        operation,
        result: Err(failure),
        transferred_bytes: 0,
    }
}

impl FaultyEngine {
    /// Wraps the engine that `build` makes from the sink it is given; `sink` gets the completions.
    pub fn new<E>(
        sink: CompletionSink,
        plan: FaultPlan,
        build: impl FnOnce(CompletionSink) -> Result<Arc<dyn Engine>, E>,
    ) -> Result<Self, E> {
        let (sender, receiver) = channel();
        // Ends when the engine and its inner engine's threads are gone.
        std::thread::spawn(move || receiver.into_iter().for_each(|completion| sink(completion)));
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            out: Mutex::new(sender),
        });
        let own = Arc::clone(&shared);
        let inner = build(Arc::new(move |completion| own.arrived(completion)))?;
        Ok(Self {
            inner,
            shared,
            plan: Mutex::new(plan),
        })
    }

    /// Number of completions held back.
    pub fn held(&self) -> usize {
        let state = lock(&self.shared.state);
        state.held.len() + state.delayed.len()
    }

    /// Delivers the completions held by [`Fault::Hold`], the last one first.
    pub fn release_backwards(&self) {
        let held = core::mem::take(&mut lock(&self.shared.state).held);
        for completion in held.into_iter().rev() {
            self.shared.deliver(completion);
        }
    }

    /// Delivers everything held back, lets pass what would be and is still under way, and starts
    /// everything stalled.
    pub fn release(&self) {
        let mut state = lock(&self.shared.state);
        state
            .faults
            .retain(|_, fault| !matches!(fault, Fault::Hold | Fault::Delay(_)));
        let delayed: Vec<_> = state
            .delayed
            .drain(..)
            .map(|(_, completion)| completion)
            .collect();
        let held = core::mem::take(&mut state.held);
        let stalled = core::mem::take(&mut state.stalled);
        drop(state);
        delayed
            .into_iter()
            .chain(held)
            .for_each(|completion| self.shared.deliver(completion));
        self.inner.submit(stalled);
    }

    /// Submits everything stalled again: the plan chooses its fault anew.
    pub fn submit_stalled_again(&self) {
        let stalled = core::mem::take(&mut lock(&self.shared.state).stalled);
        self.submit(stalled);
    }
}

impl Shared {
    fn deliver(&self, completion: Completion) {
        // The receiver lives as long as a sender does.
        drop(lock(&self.out).send(completion));
    }

    /// A completion of the inner engine.
    fn arrived(&self, mut completion: Completion) {
        let id = completion.operation.id;
        let mut state = lock(&self.state);
        let fault = state.faults.remove(&id).unwrap_or(Fault::None);
        if let Some(segments) = state.cut_off.remove(&id) {
            completion.operation.segments = segments;
        }
        let mut due = Vec::new();
        for (left, _) in &mut state.delayed {
            *left = left.saturating_sub(1);
        }
        let (ready, delayed): (Vec<_>, Vec<_>) =
            state.delayed.drain(..).partition(|(left, _)| *left == 0);
        state.delayed = delayed;
        match fault {
            Fault::Hold => state.held.push(completion),
            Fault::Delay(count) if count > 0 => state.delayed.push((count, completion)),
            Fault::FailAfter(failure) | Fault::Tear(_, failure) => {
                due.push(Completion {
                    result: Err(failure),
                    ..completion
                });
            }
            _ => due.push(completion),
        }
        drop(state);
        due.extend(ready.into_iter().map(|(_, completion)| completion));
        for completion in due {
            self.deliver(completion);
        }
    }
}

/// Cuts `segments` to their first `bytes`.
fn cut(segments: &mut Vec<Segment>, bytes: usize) {
    let mut left = bytes;
    segments.retain_mut(|segment| {
        segment.length = segment.length.min(left);
        left -= segment.length;
        segment.length > 0
    });
}

impl fmt::Debug for FaultyEngine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FaultyEngine")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl Engine for FaultyEngine {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn submit(&self, operations: Vec<Operation>) {
        let mut passed = Vec::with_capacity(operations.len());
        for mut operation in operations {
            let fault = (lock(&self.plan))(&operation);
            let mut state = lock(&self.shared.state);
            match fault {
                Fault::Fail(failure) => {
                    drop(state);
                    self.shared.deliver(without_start(operation, failure));
                    continue;
                }
                Fault::Stall => {
                    state.stalled.push(operation);
                    continue;
                }
                Fault::Tear(bytes, _) => {
                    state
                        .cut_off
                        .insert(operation.id, operation.segments.clone());
                    cut(&mut operation.segments, bytes);
                }
                Fault::Panic => operation.prelude = Prelude::new(|| panic!("as the test wants")),
                _ => {}
            }
            state.faults.insert(operation.id, fault);
            passed.push(operation);
        }
        self.inner.submit(passed);
    }

    fn expire(&self, now: Instant) {
        let mut state = lock(&self.shared.state);
        let (late, kept): (Vec<_>, Vec<_>) = state
            .stalled
            .drain(..)
            .partition(|operation| operation.deadline <= now);
        state.stalled = kept;
        drop(state);
        for operation in late {
            self.shared
                .deliver(without_start(operation, Failure::TimedOut));
        }
        self.inner.expire(now);
    }

    fn guard(&self, file: &File) {
        self.inner.guard(file);
    }

    fn leave_to_parent(&self) {
        self.inner.leave_to_parent();
    }

    fn is_started(&self, operation: OperationId) -> bool {
        let state = lock(&self.shared.state);
        let is_it = |completion: &Completion| completion.operation.id == operation;
        let kept_back = state.faults.get(&operation) == Some(&Fault::Hold)
            || state.held.iter().any(is_it)
            || state
                .delayed
                .iter()
                .any(|(_, completion)| is_it(completion));
        drop(state);
        kept_back || self.inner.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        let mut depth = self.inner.queue();
        depth.in_flight += self.held();
        depth.stuck += self.held();
        depth.queued_writes += lock(&self.shared.state).stalled.len();
        depth
    }

    fn counters(&self) -> EngineCounters {
        self.inner.counters()
    }

    fn requirements(&self) -> Alignment {
        self.inner.requirements()
    }

    fn poisoned(&self) -> bool {
        self.inner.poisoned()
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        let stalled = core::mem::take(&mut lock(&self.shared.state).stalled);
        for operation in stalled {
            self.shared
                .deliver(without_start(operation, Failure::Closed));
        }
        self.inner.shutdown(timeout) && self.held() == 0
    }
}
