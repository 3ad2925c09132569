//! The `uring` engine: one ring, and one thread that owns it and sleeps when there is nothing to
//! do.
//!
//! The thread hands the kernel up to [`DEPTH`] calls at a time, one vectored call per operation.
//! From the start of an operation until the kernel has returned it the thread owns its memory
//! handles, its vectors, its bounce buffer and its file; what others hold is only its number.
//! Completions are handed out after the ring was filled again, a few at a time, so that what a
//! sink computes does not hold the device back.
//!
//! A deadline that passes makes the thread ask the kernel to give up the call
//! (`IORING_OP_ASYNC_CANCEL`); the operation ends when the kernel returns it, with `ECANCELED` if
//! it was given up. Operations that are not to be started (too late, closed, poisoned) are
//! completed by a thread of their own, so that they end even while the ring's thread hangs in
//! `open` or `fstat` on a dead mount. Nothing else is started then: one more reason why `"auto"`
//! takes threads on mounts that can hang.
//!
//! Neither rows' files nor buffers are registered with the ring: files come and go with their
//! descriptors, and the arena need not fit the limit of locked memory. What is registered are the
//! files of [`Engine::guard`]: the kernel frees those only when the ring has drained, so that a
//! killed process keeps its lock until its last write has landed.

mod driver;
mod flight;
mod ring;
mod shared;
mod trial;

use core::fmt;
use core::time::Duration;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Instant;

use rustix::process::{Resource, getpid, getrlimit};

use super::{
    Alignment, Capabilities, CompletionSink, Engine, EngineCounters, Operation, OperationId,
    QueueDepth,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::FileCache;
use crate::io::work::Mode;
use crate::sys::clock::Clock;
use crate::sys::fs::{Direct, File};
use crate::sys::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use crate::sys::sync::{Arc, Condvar, JoinHandle, Mutex, lock, mpsc, spawn, wait_timeout};
use driver::Driver;
use ring::{Ring, Wake};
use shared::{Asleep, Shared};

pub use trial::{trial, trial_set_up};

/// Default number of operations under way.
pub const DEPTH: usize = 64;

/// Changes the kernel's answer to a call (bytes, or an errno below zero) before the engine sees
/// it: how a test makes the kernel stumble.
pub type Alter = Arc<dyn Fn(&Operation, i32) -> i32 + Send + Sync>;

/// How the engine is to work.
#[derive(Clone)]
pub struct Settings {
    /// Most operations under way, 1 to 1024.
    pub depth: usize,
    /// For tests.
    pub alter: Option<Alter>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            depth: DEPTH,
            alter: None,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Settings")
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

/// The engine. Dropping it shuts it down without waiting.
#[derive(Debug)]
pub struct Uring {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Uring {
    /// Starts the engine for files of the root with these capabilities.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] when the ring is refused (its source says with which errno) or
    /// no thread can be started.
    pub fn start(
        capabilities: &Capabilities,
        files: Arc<FileCache>,
        clock: Arc<dyn Clock>,
        sink: CompletionSink,
    ) -> Result<Self> {
        let mode = (capabilities.direct, capabilities.alignment);
        Self::with_settings(&Settings::default(), mode, files, clock, sink)
    }

    /// Starts the engine with rows moved in `mode`: direct or not, and the alignment it needs.
    ///
    /// # Errors
    /// As [`Uring::start`].
    pub fn with_settings(
        settings: &Settings,
        mode: (Direct, Alignment),
        files: Arc<FileCache>,
        clock: Arc<dyn Clock>,
        sink: CompletionSink,
    ) -> Result<Self> {
        let unavailable =
            |error| Error::new(ErrorKind::Unavailable, "no ring can be set up").with_source(error);
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            refusals: Condvar::new(),
            ended: Condvar::new(),
            wake: Arc::new(Wake::new().map_err(unavailable)?),
            files,
            clock,
            sink,
            mode: Mode::new(mode.0, mode.1),
            depth: settings.depth.clamp(1, 1024),
            files_max: files_max(),
            alter: settings.alter.clone(),
            poisoned: AtomicBool::new(false),
            ring: AtomicI32::new(-1),
            process: getpid(),
        });
        let engine = Self {
            shared,
            handles: Mutex::default(),
        };
        engine
            .start_ring()
            .and_then(|()| engine.start_refuser())
            .map_err(unavailable)?;
        Ok(engine)
    }

    /// Starts the ring's thread, which sets the ring up, and waits until that is done.
    fn start_ring(&self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let (sender, receiver) = mpsc::channel();
        let body = move || {
            // Room for every call, as many cancellations, and the event counter.
            let entries = u32::try_from(shared.depth * 2).unwrap_or(u32::MAX);
            match Ring::new(entries, Arc::clone(&shared.wake)) {
                Ok(ring) => {
                    lock(&shared.state).ring_alive = true;
                    shared.ring.store(ring.descriptor(), Ordering::Relaxed);
                    let _ = sender.send(Ok(()));
                    if Driver::new(Arc::clone(&shared), ring).run() {
                        lock(&shared.state).ring_alive = false;
                        shared.ended.notify_all();
                    }
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        };
        self.keep(spawn("kvstrata-ring", body))?;
        let broken = || Err(io::Error::other("the ring's thread has ended"));
        receiver.recv().unwrap_or_else(|_| broken())
    }

    /// Starts the thread that completes what is refused, unless it is there.
    fn start_refuser(&self) -> io::Result<()> {
        if core::mem::replace(&mut lock(&self.shared.state).refuser_alive, true) {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let started = self.keep(spawn("kvstrata-refuse", move || shared.refuse()));
        if started.is_err() {
            lock(&self.shared.state).refuser_alive = false;
        }
        started
    }

    fn keep(&self, started: io::Result<JoinHandle<()>>) -> io::Result<()> {
        let handle = started?;
        let mut handles = lock(&self.handles);
        handles.retain(|handle| !handle.is_finished());
        handles.push(handle);
        Ok(())
    }

    /// Stops admission and lets the threads end.
    fn close(&self) {
        lock(&self.shared.state).closing = true;
        self.shared.wake.signal();
        self.shared.refusals.notify_all();
    }
}

/// Most files under way at a time: few enough that they, the cache and the host's own descriptors
/// fit the process's limit.
fn files_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4).map_or(DEPTH, |quarter| quarter.clamp(8, DEPTH))
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn submit(&self, operations: Vec<Operation>) {
        let mut state = lock(&self.shared.state);
        let closing = state.closing;
        let refuses = closing || self.poisoned();
        for operation in operations {
            state.queue.push(operation);
        }
        let wakes = !refuses && state.asleep == Asleep::UntilWork;
        if wakes {
            state.asleep = Asleep::No;
        }
        drop(state);
        if wakes {
            self.shared.wake.signal();
        }
        if refuses {
            self.shared.refusals.notify_all();
        }
        if closing && self.start_refuser().is_err() {
            // No thread is to be had: the caller's is the last that can keep the promise that
            // every operation completes.
            self.shared.refuse();
        }
    }

    fn expire(&self, now: Instant) {
        let mut state = lock(&self.shared.state);
        state.queue.refuse_expired(now);
        let is_late = state.queue.depth(now).stuck > 0;
        if is_late {
            state.overdue = Some(now);
        }
        let wakes = is_late && core::mem::take(&mut state.asleep) != Asleep::No;
        drop(state);
        if wakes {
            self.shared.wake.signal();
        }
        self.shared.refusals.notify_all();
    }

    fn guard(&self, file: &File) {
        // Without a descriptor to spare the lock is held by the process alone.
        if let Ok(duplicate) = file.duplicate() {
            lock(&self.shared.state).guards.push(duplicate);
            self.shared.wake.signal();
        }
    }

    fn leave_to_parent(&self) {
        if getpid() == self.shared.process {
            return;
        }
        let descriptor = self.shared.ring.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 {
            #[expect(unsafe_code, reason = "the ring's owner is a thread of the parent")]
            // SAFETY: this is a forked child: its copy of the descriptor is open, for the number
            // is taken back before the ring is dropped, and nobody here will use or close it.
            drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }

    fn is_started(&self, operation: OperationId) -> bool {
        lock(&self.shared.state).queue.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        let now = self.shared.clock.now();
        lock(&self.shared.state).queue.depth(now)
    }

    fn counters(&self) -> EngineCounters {
        self.shared.mode.counters()
    }

    fn requirements(&self) -> Alignment {
        self.shared.mode.requirements()
    }

    fn poisoned(&self) -> bool {
        self.shared.poisoned.load(Ordering::Acquire)
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.close();
        let until = self.shared.clock.now().checked_add(timeout);
        let mut state = lock(&self.shared.state);
        while state.ring_alive || state.refuser_alive {
            let now = self.shared.clock.now();
            let left = until.map_or(timeout, |until| until.saturating_duration_since(now));
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.shared.ended, state, left);
        }
        drop(state);
        for handle in lock(&self.handles).drain(..) {
            // It has counted itself out and is at its last instruction.
            let _ = handle.join();
        }
        true
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.close();
    }
}
