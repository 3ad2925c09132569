//! Tiers: where rows are stored, and the one type the binding knows.

mod arguments;
mod close;
mod container;
mod disk;
mod foreign;
mod inventory;
mod keeper;
mod launch;
mod load;
mod open;
mod pending;
mod plan;
mod recover;
mod removals;
mod request;
mod root_lock;
mod row_file;
mod rows;
mod space;
mod state;
mod stats;
mod store;
mod writer;

use core::fmt;
use core::time::Duration;
use std::os::fd::RawFd;

use serde_json::{Map, Value};

use crate::buffer::Arena;
use crate::config::TierOptions;
use crate::error::{ErrorKind, Result};
use crate::io::file::FileCache;
use crate::io::threads::Threads;
use crate::io::uring::Uring;
use crate::io::{Capabilities, CompletionSink, Engine};
use crate::job::{JobId, JobKind, JobResult, JobTable};
use crate::key::Key;
use crate::metrics::Metrics;
use crate::notice::{Notice, Notices};
use crate::sys::clock::{Clock, SystemClock};
use crate::sys::sync::{Arc, Mutex, lock, try_lock};
use crate::tier::disk::{DiskTier, Surroundings, closed};
use crate::tier::pending::Pending;

pub use crate::tier::root_lock::ROOT_LOCK_NAME;

/// Slice in which [`Tier::drain`] looks whether the kernel has returned everything.
const DRAIN_SLICE: Duration = Duration::from_millis(20);

/// Makes the engine that moves a tier's bytes.
pub type StartEngine = Arc<
    dyn Fn(&Capabilities, Arc<FileCache>, Arc<dyn Clock>, CompletionSink) -> Result<Arc<dyn Engine>>
        + Send
        + Sync,
>;

/// Where a tier meets the machine; tests put doubles here.
#[derive(Clone)]
pub struct Seams {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// The engine.
    pub start_engine: StartEngine,
}

impl Default for Seams {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            start_engine: Arc::new(|capabilities, files, clock, sink| {
                Ok(match capabilities.io_backend {
                    "uring" => Arc::new(Uring::start(capabilities, files, clock, sink)?),
                    _ => Arc::new(Threads::start(capabilities, files, clock, sink)?),
                })
            }),
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

/// A tier as its user sees it. Any thread may call any method.
///
/// Only [`Tier::wait`], [`Tier::drain`], [`Tier::close`] and [`Tier::reset`] may wait for
/// anything; all other methods return at once.
#[derive(Debug)]
pub struct Tier {
    around: Surroundings,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
enum Inner {
    /// The root is in use.
    Ready(Arc<DiskTier>),
    /// The root could not be used yet; a thread tries again and again.
    Pending(Arc<Pending>),
    /// Closed: `Some` while the kernel still owns arena bytes.
    Closed(Option<Arc<DiskTier>>),
}

/// What a call finds.
enum Found {
    Ready(Arc<DiskTier>),
    Pending,
}

impl Tier {
    /// Opens a tier. With `required` false an unusable root gives a tier that misses, drops
    /// stores, and tries again by itself.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the field or path.
    pub fn open(options: TierOptions, arena: Arena) -> Result<Self> {
        Self::open_shared(options, Arc::new(arena), Seams::default())
    }

    /// Opens a tier on an arena that others look at too, and on another clock or engine than the
    /// machine's.
    ///
    /// # Errors
    /// As [`Tier::open`].
    pub fn open_shared(options: TierOptions, arena: Arc<Arena>, seams: Seams) -> Result<Self> {
        open::check_options(&options)?;
        let Seams {
            clock,
            start_engine,
        } = seams;
        let around = Surroundings {
            arena,
            jobs: Arc::new(JobTable::new(Arc::clone(&clock))?),
            metrics: Arc::new(Metrics::default()),
            notices: Arc::new(Notices::new(Arc::clone(&clock))),
            clock,
            start_engine,
        };
        let inner = match DiskTier::open(&options, around.clone()) {
            Ok(tier) => Inner::Ready(tier),
            Err(error) if options.required => return Err(error),
            Err(error) => Inner::Pending(Pending::start(options, around.clone(), &error)?),
        };
        Ok(Self {
            around,
            inner: Mutex::new(inner),
        })
    }

    fn find(&self) -> Result<Found> {
        let mut inner = lock(&self.inner);
        if let Inner::Pending(pending) = &*inner {
            let Some(tier) = pending.take() else {
                return Ok(Found::Pending);
            };
            *inner = Inner::Ready(tier);
        }
        match &*inner {
            Inner::Ready(tier) => Ok(Found::Ready(Arc::clone(tier))),
            Inner::Pending(_) | Inner::Closed(_) => Err(closed()),
        }
    }

    /// Whether the row of each key is there; `None`: not known yet, ask again (never from disk).
    /// Neither pins nor counts as an access.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        match self.find()? {
            Found::Ready(tier) => tier.lookup(keys),
            Found::Pending => Ok(vec![Some(false); keys.len()]),
        }
    }

    /// Begins to store slots as the rows of keys. `offsets` are bytes in the arena; a slot must
    /// not be written before the job's result is polled.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] naming what is wrong; [`ErrorKind::Closed`]. Nothing was begun.
    pub fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        match self.find()? {
            Found::Ready(tier) => tier.store(job_id, keys, offsets),
            Found::Pending => self.with_pending(job_id, JobKind::Store, keys, offsets),
        }
    }

    /// Begins to load rows to slots. A slot must not be read before the job's result is polled,
    /// and then only where the outcome is `ok`.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        match self.find()? {
            Found::Ready(tier) => tier.load(job_id, keys, offsets),
            Found::Pending => self.with_pending(job_id, JobKind::Load, keys, offsets),
        }
    }

    fn with_pending(
        &self,
        job_id: JobId,
        kind: JobKind,
        keys: &[Key],
        offsets: &[u64],
    ) -> Result<()> {
        match &*lock(&self.inner) {
            Inner::Pending(pending) => pending.refuse(job_id, kind, keys, offsets),
            Inner::Ready(tier) => match kind {
                JobKind::Store => tier.store(job_id, keys, offsets),
                JobKind::Load => tier.load(job_id, keys, offsets),
            },
            Inner::Closed(_) => Err(closed()),
        }
    }

    /// Results since the last call; clears the eventfd.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn poll(&self) -> Result<Vec<JobResult>> {
        self.find()?;
        Ok(self.around.jobs.poll())
    }

    /// Waits until a result is there or `timeout` is over, then acts as [`Tier::poll`].
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn wait(&self, timeout: Duration) -> Result<Vec<JobResult>> {
        self.find()?;
        Ok(self.around.jobs.wait(timeout))
    }

    /// Waits at most about `timeout` for [`Tier::drain`]'s condition; says whether it holds.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn drain_for(&self, timeout: Duration) -> Result<bool> {
        match self.find()? {
            Found::Ready(tier) => {
                let clock = &self.around.clock;
                let begun = clock.now();
                loop {
                    let left = timeout.saturating_sub(clock.now().saturating_duration_since(begun));
                    if tier.wait_quiet(left) {
                        return Ok(true);
                    }
                    if left.is_zero() {
                        return Ok(false);
                    }
                    // No job runs, but the kernel still has slots of ended ones.
                    clock.sleep(DRAIN_SLICE.min(left));
                }
            }
            Found::Pending => Ok(true),
        }
    }

    /// Returns when no operation touches the arena; results stay to be polled. The one call that
    /// may wait without limit.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn drain(&self) -> Result<()> {
        while !self.drain_for(Duration::from_secs(1))? {}
        Ok(())
    }

    /// The eventfd that is readable while results wait.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn fileno(&self) -> Result<RawFd> {
        self.find()?;
        Ok(self.around.jobs.fileno())
    }

    /// Slots that ended jobs named busy and the kernel still owns.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn busy_offsets(&self) -> Result<Vec<u64>> {
        match self.find()? {
            Found::Ready(tier) => Ok(tier.busy_offsets()),
            Found::Pending => Ok(Vec::new()),
        }
    }

    /// Counts an access to each key; unknown ones are ignored.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn touch(&self, keys: &[Key]) -> Result<()> {
        match self.find()? {
            Found::Ready(tier) => tier.touch(keys),
            Found::Pending => Ok(()),
        }
    }

    /// Hides keys at once; unknown ones are ignored. The space of a pinned row follows.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn remove(&self, keys: &[Key]) -> Result<()> {
        match self.find()? {
            Found::Ready(tier) => tier.remove(keys),
            Found::Pending => Ok(()),
        }
    }

    /// Makes everything stored before invisible, also after a restart. False when that could not
    /// be recorded: the tier then serves nothing until a later reset succeeds.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn reset(&self) -> Result<bool> {
        match self.find()? {
            Found::Ready(tier) => tier.reset(),
            Found::Pending => {
                // The lock is not held over I/O: every call takes it.
                let pending = match &*lock(&self.inner) {
                    Inner::Pending(pending) => Some(Arc::clone(pending)),
                    Inner::Ready(_) | Inner::Closed(_) => None,
                };
                pending.map_or_else(|| self.reset(), |pending| Ok(pending.reset()))
            }
        }
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn stats(&self) -> Result<Map<String, Value>> {
        match self.find()? {
            Found::Ready(tier) => Ok(tier.stats()),
            Found::Pending => {
                let mut all = self.around.metrics.snapshot();
                all.insert("health".into(), "unusable".into());
                if let Inner::Pending(pending) = &*lock(&self.inner) {
                    all.insert("last_error".into(), pending.last_error().into());
                }
                Ok(all)
            }
        }
    }

    /// What the root can do and what was chosen; empty while the root is not usable.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub fn capabilities(&self) -> Result<Map<String, Value>> {
        match self.find()? {
            Found::Ready(tier) => Ok(tier.capabilities()),
            Found::Pending => Ok(Map::new()),
        }
    }

    /// Log lines kept since the last call; also of a closed tier.
    pub fn take_notices(&self) -> Vec<Notice> {
        self.around.notices.take()
    }

    /// For a forked child, which must call nothing else: lets the root go, so that the child does
    /// not keep it from others when its parent has ended. Changes nothing for the parent.
    pub fn leave_root_to_parent(&self) {
        let tier = try_lock(&self.inner).and_then(|inner| match &*inner {
            Inner::Ready(tier) => Some(Arc::clone(tier)),
            Inner::Closed(stuck) => stuck.clone(),
            Inner::Pending(_) => None,
        });
        if let Some(tier) = tier {
            tier.leave_root_to_parent();
            // The parent's threads, which this handle would wait for, are not in this process.
            core::mem::forget(tier);
        }
    }

    /// Closes the tier. After success it does nothing; after `Busy` it tries again.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while the kernel still owns arena bytes.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let tier = {
            let mut inner = lock(&self.inner);
            let tier = match core::mem::replace(&mut *inner, Inner::Closed(None)) {
                Inner::Ready(tier) => Some(tier),
                Inner::Pending(pending) => pending.stop(),
                Inner::Closed(stuck) => stuck,
            };
            *inner = Inner::Closed(tier.clone());
            tier
        };
        let Some(tier) = tier else {
            return Ok(());
        };
        let closed = tier.close(timeout);
        if closed.as_ref().map_err(crate::error::Error::kind) != Err(ErrorKind::Busy) {
            *lock(&self.inner) = Inner::Closed(None);
        }
        closed
    }
}

/// How long a tier that is dropped without [`Tier::close`] waits for what runs.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

impl Drop for Tier {
    /// Closes the tier, within ten seconds. Memory that the kernel still uses by then stays in
    /// use: whoever owns the arena must have closed the tier before.
    fn drop(&mut self) {
        let _ = self.close(DROP_TIMEOUT);
    }
}
