//! The job table: what was asked, what came of each key, polled by the caller.

use core::time::Duration;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};
use crate::sys::clock::Clock;
use crate::sys::sync::{Arc, Condvar, Mutex, lock, wait_timeout_while};

/// The caller's number of a job.
pub type JobId = u64;

/// Which way a job moves rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Slots to rows.
    Store,
    /// Rows to slots.
    Load,
}

impl JobKind {
    /// The word the Python API uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Load => "load",
        }
    }
}

/// What came of one key of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Stored, or loaded and verified.
    Ok,
    /// A store of a key that is there already.
    Present,
    /// A load of a key that is not there.
    Miss,
    /// A load whose bytes were not those stored.
    Corrupt,
    /// A store for which no space could be made.
    NoSpace,
    /// The device or file system failed.
    IoError,
    /// Not done by the deadline.
    Timeout,
    /// A store given up: overload, reset, removal or close.
    Dropped,
}

impl Outcome {
    /// Every outcome, in the order of the counters.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::Present,
        Self::Miss,
        Self::Corrupt,
        Self::NoSpace,
        Self::IoError,
        Self::Timeout,
        Self::Dropped,
    ];

    /// The word the Python API uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Present => "present",
            Self::Miss => "miss",
            Self::Corrupt => "corrupt",
            Self::NoSpace => "no_space",
            Self::IoError => "io_error",
            Self::Timeout => "timeout",
            Self::Dropped => "dropped",
        }
    }

    /// Whether the key is where the job should have brought it.
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Ok | Self::Present)
    }
}

/// What a finished job has to say.
#[derive(Clone, Debug, PartialEq)]
pub struct JobResult {
    /// The caller's number.
    pub job_id: JobId,
    /// Store or load.
    pub kind: JobKind,
    /// One outcome per key, in the order of the keys.
    pub outcomes: Vec<Outcome>,
    /// Positions whose slots the kernel may still write.
    pub busy: Vec<usize>,
    /// Payload bytes of the keys with outcome `ok`.
    pub bytes: u64,
    /// Time from the call to the last outcome.
    pub duration: Duration,
    /// The first failure in words.
    pub error: Option<String>,
}

impl JobResult {
    /// Whether every key succeeded.
    pub fn success(&self) -> bool {
        self.outcomes.iter().all(|outcome| outcome.is_success())
    }
}

/// One key's end, as the tier reports it to the table.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Position of the key in its job.
    pub position: usize,
    /// What came of it.
    pub outcome: Outcome,
    /// Payload bytes moved.
    pub bytes: u64,
    /// Whether the kernel may still write the slot.
    pub busy: bool,
}

impl Settlement {
    /// An outcome without bytes.
    pub(crate) const fn plain(position: usize, outcome: Outcome) -> Self {
        Self {
            position,
            outcome,
            bytes: 0,
            busy: false,
        }
    }
}

#[derive(Debug)]
struct Job {
    kind: JobKind,
    outcomes: Vec<Option<Outcome>>,
    open: usize,
    busy: Vec<usize>,
    bytes: u64,
    begun: Instant,
    error: Option<String>,
}

#[derive(Debug, Default)]
struct Table {
    running: HashMap<JobId, Job>,
    finished: VecDeque<JobResult>,
    /// Ids in `finished`, so that a job id cannot be used again before it is polled.
    unpolled: HashSet<JobId>,
}

/// All jobs that are running or not yet polled.
///
/// Any thread may call any method; none waits for I/O except [`JobTable::wait`] and
/// [`JobTable::wait_idle`].
#[derive(Debug)]
pub struct JobTable {
    table: Mutex<Table>,
    changed: Condvar,
    event: OwnedFd,
    clock: Arc<dyn Clock>,
}

impl AsFd for JobTable {
    /// The eventfd of [`JobTable::fileno`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl JobTable {
    /// An empty table with a new eventfd.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] when no eventfd can be had.
    pub fn new(clock: Arc<dyn Clock>) -> Result<Self> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                Error::new(ErrorKind::Unavailable, "cannot create an eventfd")
                    .with_source(errno.into())
            })?;
        Ok(Self {
            table: Mutex::default(),
            changed: Condvar::new(),
            event,
            clock,
        })
    }

    /// The eventfd that is readable while finished jobs wait to be polled.
    pub fn fileno(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Enters a job of `keys` keys; one without keys is finished at once.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the id is running or not yet polled.
    pub fn begin(&self, job_id: JobId, kind: JobKind, keys: usize) -> Result<()> {
        let mut table = lock(&self.table);
        if table.running.contains_key(&job_id) || table.unpolled.contains(&job_id) {
            let state = if table.running.contains_key(&job_id) {
                "in flight"
            } else {
                "not polled yet"
            };
            return Err(Error::argument(format!("job_id: {job_id} is {state}")));
        }
        let job = Job {
            kind,
            outcomes: vec![None; keys],
            open: keys,
            busy: Vec::new(),
            bytes: 0,
            begun: self.clock.now(),
            error: None,
        };
        table.running.insert(job_id, job);
        if keys == 0 {
            self.finish(&mut table, job_id);
        }
        Ok(())
    }

    /// Records the end of some keys of a job; each position counts once.
    pub fn settle(&self, job_id: JobId, settlements: &[Settlement], error: Option<&str>) {
        let mut table = lock(&self.table);
        let Some(job) = table.running.get_mut(&job_id) else {
            return;
        };
        for settlement in settlements {
            let Some(slot @ None) = job.outcomes.get_mut(settlement.position) else {
                continue;
            };
            *slot = Some(settlement.outcome);
            job.open = job.open.saturating_sub(1);
            job.bytes = job.bytes.saturating_add(settlement.bytes);
            if settlement.busy {
                job.busy.push(settlement.position);
            }
        }
        if job.error.is_none() {
            job.error = error.map(str::to_owned);
        }
        if job.open == 0 {
            self.finish(&mut table, job_id);
        }
    }

    fn finish(&self, table: &mut Table, job_id: JobId) {
        let Some(mut job) = table.running.remove(&job_id) else {
            return;
        };
        job.busy.sort_unstable();
        table.unpolled.insert(job_id);
        table.finished.push_back(JobResult {
            job_id,
            kind: job.kind,
            // Every outcome is set here: `open` reached zero.
            outcomes: job
                .outcomes
                .into_iter()
                .map(|o| o.unwrap_or(Outcome::Dropped))
                .collect(),
            busy: job.busy,
            bytes: job.bytes,
            duration: self.clock.now().saturating_duration_since(job.begun),
            error: job.error,
        });
        // A full counter (EAGAIN) is readable all the same; nothing else can go wrong here.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        self.changed.notify_all();
    }

    /// Positions of a running job that have no outcome yet.
    pub fn open_positions(&self, job_id: JobId) -> Vec<usize> {
        let table = lock(&self.table);
        let outcomes = table.running.get(&job_id).map(|job| job.outcomes.iter());
        outcomes
            .into_iter()
            .flatten()
            .enumerate()
            .filter(|(_, outcome)| outcome.is_none())
            .map(|(position, _)| position)
            .collect()
    }

    /// Takes all finished jobs and clears the eventfd.
    pub fn poll(&self) -> Vec<JobResult> {
        let mut table = lock(&self.table);
        self.take(&mut table)
    }

    fn take(&self, table: &mut Table) -> Vec<JobResult> {
        let mut counter = [0; 8];
        // EAGAIN means nothing has been signalled since the last poll.
        let _ = rustix::io::read(&self.event, &mut counter);
        table.unpolled.clear();
        table.finished.drain(..).collect()
    }

    /// Waits until a job has finished or `timeout` is over, then acts as [`JobTable::poll`].
    pub fn wait(&self, timeout: Duration) -> Vec<JobResult> {
        let table = lock(&self.table);
        let nothing_yet = |table: &mut Table| table.finished.is_empty();
        let mut table = wait_timeout_while(&self.changed, table, timeout, nothing_yet);
        self.take(&mut table)
    }

    /// Waits until no job is running or `timeout` is over; says whether none is.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let table = lock(&self.table);
        let busy = |table: &mut Table| !table.running.is_empty();
        let table = wait_timeout_while(&self.changed, table, timeout, busy);
        table.running.is_empty()
    }

    /// Number of jobs that are running.
    pub fn running(&self) -> usize {
        lock(&self.table).running.len()
    }

    /// Number of jobs that wait to be polled.
    pub fn unpolled(&self) -> usize {
        lock(&self.table).finished.len()
    }
}
