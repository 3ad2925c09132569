//! Tiers: where rows are stored, and the one type the binding knows.

mod arguments;
mod availability;
mod batch;
mod chores;
mod circuit;
mod close;
mod container;
mod disk;
mod entries;
mod file_trouble;
mod foreign;
mod give_back;
mod growth;
mod health;
mod inventory;
mod keeper;
mod kept;
mod landing;
mod last_error;
mod launch;
mod limits;
mod load;
mod load_buffers;
mod nested;
mod object;
mod observed;
mod open;
mod overdue;
mod pending;
mod phase;
mod plan;
mod recover;
mod removals;
mod request;
mod root_lock;
mod row_file;
mod rows;
mod seams;
mod served;
mod settle;
mod space;
mod starved;
mod state;
mod stats;
mod store;
mod sums;
mod surroundings;
mod touched;
mod touches;
mod trial;
mod victims;
mod waiters;
mod writer;
mod written;

use core::time::Duration;
use std::os::fd::RawFd;

use serde_json::{Map, Value};

use crate::buffer::Arena;
use crate::config::{self, TierOptions};
use crate::error::Result;
use crate::eviction::request::Context;
use crate::job::{JobId, JobKind, JobResult};
use crate::key::Key;
use crate::notice::Notice;
use crate::object::{ObjectOptions, Store};
use crate::sys::fs::Noted;
use crate::sys::sync::Arc;
use crate::tier::availability::{Availability, Found};
use crate::tier::disk::DiskTier;
use crate::tier::object::{ObjectTier, ServedObjects};
use crate::tier::pending::Pending;
use crate::tier::surroundings::Surroundings;

pub use crate::tier::circuit::CircuitLimits;
pub use crate::tier::root_lock::ROOT_LOCK_NAME;
pub use crate::tier::seams::{ProbeRoot, Seams, StartEngine};

/// Slice in which [`Tier::drain`] looks whether the kernel has returned everything.
const DRAIN_SLICE: Duration = Duration::from_millis(20);

/// A tier as its user sees it. Any thread may call any method.
///
/// Only [`Tier::wait`], [`Tier::drain`], [`Tier::close`] and [`Tier::reset`] may wait for
/// anything; all other methods return at once.
#[derive(Debug)]
pub struct Tier {
    /// Keeps the eventfd written down; dropped before it is closed.
    _event: Option<Noted>,
    around: Surroundings,
    availability: Availability,
}

impl Tier {
    /// Opens a tier. With `required` false an unusable root gives a tier that misses, drops
    /// stores, and tries again by itself.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] naming the field or path.
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
        config::check_arena(&options.row_bytes, &arena)?;
        let around = Surroundings::new(arena, seams)?;
        let event = around.descriptors.note(&*around.jobs);
        let availability = match DiskTier::open(&options, around.clone()) {
            Ok(tier) => Availability::ready(tier),
            Err(error) if options.required => return Err(error),
            Err(error) => Availability::pending(Pending::start(options, around.clone(), &error)?),
        };
        Ok(Self {
            _event: event,
            around,
            availability,
        })
    }

    /// Opens a tier on a bucket. With `required` false an unusable one gives a tier that misses,
    /// drops stores, and tries again by itself.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] naming the field, or saying what is wrong with the
    /// bucket.
    pub fn open_object(options: ObjectOptions, arena: Arena) -> Result<Self> {
        Self::open_object_shared(options, Arc::new(arena), Seams::default(), None)
    }

    /// Opens a tier on a bucket: on an arena that others look at too, with other limits of its
    /// circuit, and through the client `given` instead of one of its own.
    ///
    /// # Errors
    /// As [`Tier::open_object`].
    pub fn open_object_shared(
        options: ObjectOptions,
        arena: Arc<Arena>,
        seams: Seams,
        given: Option<Store>,
    ) -> Result<Self> {
        options.validate()?;
        config::check_arena(&options.row_bytes, &arena)?;
        let around = Surroundings::new(arena, seams)?;
        let event = around.descriptors.note(&*around.jobs);
        let tier = ObjectTier::open(options, around.clone(), given)?;
        Ok(Self {
            _event: event,
            around,
            availability: Availability::ready(Arc::new(ServedObjects(tier))),
        })
    }

    /// Whether the row of each key is there; `None`: not known yet, ask again (never from disk).
    /// Neither pins nor counts as an access.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.lookup(keys),
            Found::Pending => Ok(vec![Some(false); keys.len()]),
        }
    }

    /// Begins to store slots as the rows of keys. `offsets` are bytes in the arena; a slot must
    /// not be written before the job's result is polled.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Argument`] naming what is wrong;
    /// [`crate::error::ErrorKind::Closed`]. Nothing was begun.
    pub fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.store(job_id, keys, offsets),
            Found::Pending => self
                .availability
                .begin_late(job_id, JobKind::Store, keys, offsets),
        }
    }

    /// Begins to load rows to slots. A slot must not be read before the job's result is polled,
    /// and then only where the outcome is `ok`.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.load(job_id, keys, offsets),
            Found::Pending => self
                .availability
                .begin_late(job_id, JobKind::Load, keys, offsets),
        }
    }

    /// Results since the last call; clears the eventfd.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn poll(&self) -> Result<Vec<JobResult>> {
        self.availability.find()?;
        Ok(self.around.jobs.poll())
    }

    /// Waits until a result is there or `timeout` is over, then acts as [`Tier::poll`].
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn wait(&self, timeout: Duration) -> Result<Vec<JobResult>> {
        self.availability.find()?;
        Ok(self.around.jobs.wait(timeout))
    }

    /// Waits at most about `timeout` for [`Tier::drain`]'s condition; says whether it holds.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn drain_for(&self, timeout: Duration) -> Result<bool> {
        match self.availability.find()? {
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
    /// [`crate::error::ErrorKind::Closed`].
    pub fn drain(&self) -> Result<()> {
        while !self.drain_for(Duration::from_secs(1))? {}
        Ok(())
    }

    /// The eventfd that is readable while results wait.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn fileno(&self) -> Result<RawFd> {
        self.availability.find()?;
        Ok(self.around.jobs.fileno())
    }

    /// Slots that ended jobs named busy and the kernel still owns.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn busy_offsets(&self) -> Result<Vec<u64>> {
        match self.availability.find()? {
            Found::Ready(tier) => Ok(tier.busy_offsets()),
            Found::Pending => Ok(Vec::new()),
        }
    }

    /// Counts an access to each key; unknown ones are ignored.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn touch(&self, keys: &[Key]) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.touch(keys),
            Found::Pending => Ok(()),
        }
    }

    /// A request has arrived, with all its keys in token order, found or not: its one access to
    /// them, so that its loads and touches do not count again. Its rows go last until
    /// [`Tier::finish`]. A request that is open already changes nothing.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn observe(&self, request: &str, keys: &[Key], context: Context) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.observe(request, keys, context),
            Found::Pending => Ok(()),
        }
    }

    /// An observed request has ended; one that is not open is ignored.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn finish(&self, request: &str, output_tokens: Option<u32>) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.finish(request, output_tokens),
            Found::Pending => Ok(()),
        }
    }

    /// Hides keys at once; unknown ones are ignored. The space of a pinned row follows.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn remove(&self, keys: &[Key]) -> Result<()> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.remove(keys),
            Found::Pending => Ok(()),
        }
    }

    /// Makes everything stored before invisible, also after a restart. False when that could not
    /// be recorded: the tier then serves nothing until a later reset succeeds.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn reset(&self) -> Result<bool> {
        match self.availability.find()? {
            Found::Ready(tier) => tier.reset(),
            Found::Pending => {
                // The lock is not held over I/O: every call takes it.
                let pending = self.availability.attempts();
                pending.map_or_else(|| self.reset(), |pending| Ok(pending.reset()))
            }
        }
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn stats(&self) -> Result<Map<String, Value>> {
        match self.availability.find()? {
            Found::Ready(tier) => Ok(tier.stats()),
            Found::Pending => {
                let mut all = self.around.metrics.snapshot();
                all.insert("health".into(), "unusable".into());
                if let Some(pending) = self.availability.attempts() {
                    let now = self.around.clock.now();
                    let last = pending.last_error();
                    let last = last.map_or(Value::Null, |last| last.to_json(now));
                    all.insert("last_error".into(), last);
                }
                Ok(all)
            }
        }
    }

    /// What the root can do and what was chosen; empty while the root is not usable.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Closed`].
    pub fn capabilities(&self) -> Result<Map<String, Value>> {
        match self.availability.find()? {
            Found::Ready(tier) => Ok(tier.capabilities()),
            Found::Pending => Ok(Map::new()),
        }
    }

    /// Log lines kept since the last call; also of a closed tier.
    pub fn take_notices(&self) -> Vec<Notice> {
        self.around.notices.take()
    }

    /// For a forked child, which must call nothing else and must not drop the tier: closes the
    /// child's copies of all descriptors, so that it keeps neither the root nor deleted files from
    /// others when its parent has ended. Changes nothing for the parent.
    pub fn leave_root_to_parent(&self) {
        self.around.leave_to_parent();
    }

    /// Closes the tier. After success it does nothing; after `Busy` it tries again.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Busy`] while the kernel still owns arena bytes.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.availability.close(timeout)
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
