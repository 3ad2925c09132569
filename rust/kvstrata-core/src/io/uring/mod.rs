//! The `uring` engine: one ring, and one thread that owns it and sleeps when there is nothing to
//! do.
//!
//! The thread hands the kernel up to [`DEPTH`] calls on a file at a time (and some more on others),
//! one vectored call per operation. From the start of an operation until the kernel has returned it
//! the thread owns its memory handles, its vectors, its bounce buffer and its file; what others hold
//! is only its number. Completions are handed out after the ring was filled again, a few at a time,
//! so that what a sink computes does not hold the device back.
//!
//! A deadline that passes makes the thread ask the kernel to give up the call
//! (`IORING_OP_ASYNC_CANCEL`); the operation ends when the kernel returns it, with `ECANCELED` if
//! it was given up. Where calls can hang (network, FUSE) the thread makes none: files are opened,
//! looked at and closed by threads that may.
//!
//! When the kernel takes no more calls of a ring that it gave, another engine takes over what it
//! has not taken, and what is still to come.
//!
//! Neither rows' files nor buffers are registered with the ring: files come and go with their
//! descriptors, and the arena need not fit the limit of locked memory. What is registered are the
//! files of [`Engine::guard`]: the kernel frees those only when the ring has drained, so that a
//! killed process keeps its lock until its last write has landed.

mod answers;
mod driver;
mod errands;
mod flight;
mod looks;
mod ring;
mod shared;
mod succession;
mod trial;
mod waits;

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
use crate::io::alter::Alter;
use crate::io::file::FileCache;
use crate::io::intake::{Intake, Intaken};
use crate::io::settle::Settler;
use crate::io::threads::Threads;
use crate::io::work::Mode;
use crate::sys::clock::Clock;
use crate::sys::fs::{Direct, File};
use crate::sys::sync::atomic::{AtomicI32, Ordering};
use crate::sys::sync::{Arc, mpsc};
use driver::Driver;
use errands::Errands;
use ring::{Ring, Wake};
use shared::{Asleep, RingState, Shared};

pub use trial::{trial, trial_set_up};

/// Default number of operations under way.
pub const DEPTH: usize = 64;

/// Makes the engine that takes over when the kernel takes no more calls, for rows moved as given.
pub type Heir = Arc<dyn Fn((Direct, Alignment)) -> Result<Arc<dyn Engine>> + Send + Sync>;

/// How the engine is to work.
#[derive(Clone)]
pub struct Settings {
    /// Most operations of one file under way, 1 to 1024. There may be a quarter more in all.
    pub depth: usize,
    /// Whether calls on the files can hang: none is then made by the ring's own thread.
    pub may_hang: bool,
    /// Whether the page cache is to forget the rows that go through it.
    pub small_cache: bool,
    /// Without one the engine is poisoned when the kernel takes no more calls.
    pub heir: Option<Heir>,
    /// For tests.
    pub alter: Option<Alter>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            depth: DEPTH,
            may_hang: false,
            small_cache: false,
            heir: None,
            alter: None,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Settings")
            .field("depth", &self.depth)
            .field("may_hang", &self.may_hang)
            .field("small_cache", &self.small_cache)
            .finish_non_exhaustive()
    }
}

/// The engine. Dropping it shuts it down without waiting.
#[derive(Debug)]
pub struct Uring {
    shared: Arc<Shared>,
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
        let small_cache = !capabilities.in_memory();
        let make = {
            let (files, clock, sink) = (Arc::clone(&files), Arc::clone(&clock), Arc::clone(&sink));
            move |mode| {
                let parts = (Arc::clone(&files), Arc::clone(&clock), Arc::clone(&sink));
                let threads = Threads::with_mode(mode, small_cache, parts.0, parts.1, parts.2)?;
                Ok::<Arc<dyn Engine>, _>(Arc::new(threads))
            }
        };
        let settings = Settings {
            may_hang: capabilities.may_hang,
            small_cache,
            heir: Some(Arc::new(make)),
            ..Settings::default()
        };
        Self::with_settings(&settings, mode, files, clock, sink)
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
        let depth = settings.depth.clamp(1, 1024);
        let intake = Intake::new(depth, RingState::default(), clock, sink);
        let shared = Arc::new(Shared {
            intake: Arc::new(intake),
            wake: Arc::new(Wake::new().map_err(unavailable)?),
            files,
            errands: Errands::default(),
            settler: Settler::default(),
            mode: Mode::new(mode.0, mode.1, settings.small_cache),
            depth,
            files_max: files_max(),
            may_hang: settings.may_hang,
            alter: settings.alter.clone(),
            heir: settings.heir.clone(),
            ring: AtomicI32::new(-1),
            process: getpid(),
        });
        let engine = Self { shared };
        engine
            .start_ring()
            .and_then(|()| engine.shared.intake.start_refuser())
            .map_err(unavailable)?;
        Ok(engine)
    }

    /// Starts the ring's thread, which sets the ring up, and waits until that is done.
    fn start_ring(&self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let (sender, receiver) = mpsc::channel();
        let body = move || {
            // Room for every call, as many cancellations, and the event counter.
            let entries = u32::try_from(shared.depth_in_all() * 2).unwrap_or(u32::MAX);
            match Ring::new(entries, Arc::clone(&shared.wake)) {
                Ok(mut ring) => {
                    if shared.may_hang {
                        ring.never_block(shared.depth_in_all());
                    }
                    shared.intake.lock().alive += 1;
                    shared.ring.store(ring.descriptor(), Ordering::Relaxed);
                    let _ = sender.send(Ok(()));
                    let is_over = Driver::new(Arc::clone(&shared), ring).run();
                    shared.errands.end();
                    if is_over {
                        shared.intake.end_thread();
                    }
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        };
        self.shared.intake.spawn("kvstrata-ring", body)?;
        let broken = || Err(io::Error::other("the ring's thread has ended"));
        receiver.recv().unwrap_or_else(|_| broken())
    }

    /// Stops admission and lets the threads end.
    fn close(&self) {
        self.shared.intake.close();
        self.shared.wake.signal();
    }
}

/// Most files under way at a time: few enough that they, the cache and the host's own descriptors
/// fit the process's limit.
fn files_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4).map_or(DEPTH, |quarter| quarter.clamp(8, DEPTH))
}

impl Engine for Uring {
    /// `"threads"` once they have taken over.
    fn name(&self) -> &'static str {
        let successor = self.shared.intake.successor();
        successor.map_or("uring", |successor| successor.name())
    }

    fn submit(&self, operations: Vec<Operation>) {
        let rouse = |state: &mut Intaken<RingState>| {
            let wakes = state.own.asleep == Asleep::UntilWork;
            if wakes {
                state.own.asleep = Asleep::No;
            }
            wakes
        };
        if self.shared.intake.submit(operations, rouse) == Some(true) {
            self.shared.wake.signal();
        }
    }

    fn expire(&self, now: Instant) {
        let rouse = |state: &mut Intaken<RingState>| {
            let is_late = state.queue.depth(now).stuck > 0;
            if is_late {
                state.own.overdue = Some(now);
            }
            is_late && core::mem::take(&mut state.own.asleep) != Asleep::No
        };
        if self.shared.intake.expire(now, rouse) {
            self.shared.wake.signal();
        }
    }

    fn guard(&self, file: &File) {
        // Without a descriptor to spare the lock is held by the process alone.
        if let Ok(duplicate) = file.duplicate() {
            self.shared.intake.lock().own.guards.push(duplicate);
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
            let descriptor = self.shared.wake.number();
            #[expect(unsafe_code, reason = "the counter's owners are the parent's threads")]
            // SAFETY: as above; the counter is open as long as the engine, whose ring was.
            drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }

    fn is_started(&self, operation: OperationId) -> bool {
        self.shared.intake.is_started(operation)
    }

    fn queue(&self) -> QueueDepth {
        self.shared.intake.depth()
    }

    fn counters(&self) -> EngineCounters {
        let own = self.shared.mode.counters();
        let successor = self.shared.intake.successor();
        successor.map_or(own, |successor| own.plus(successor.counters()))
    }

    fn requirements(&self) -> Alignment {
        let successor = self.shared.intake.successor();
        successor.map_or_else(
            || self.shared.mode.requirements(),
            |successor| successor.requirements(),
        )
    }

    fn poisoned(&self) -> bool {
        let successor = self.shared.intake.successor();
        self.shared.intake.poisoned() || successor.is_some_and(|successor| successor.poisoned())
    }

    fn shutdown(&self, timeout: Duration) -> bool {
        self.close();
        self.shared.intake.wait_for_end(timeout)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.close();
    }
}
