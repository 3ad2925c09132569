//! A tier whose root cannot be used yet: it misses, and tries again by itself.

use core::time::Duration;

use crate::config::TierOptions;
use crate::error::{Error, Result};
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::notice::Level;
use crate::sys::errno::errno_name;
use crate::sys::sync::{Arc, Condvar, JoinHandle, Mutex, lock, spawn, wait_timeout};
use crate::tier::arguments::check_arguments;
use crate::tier::disk::DiskTier;
use crate::tier::last_error::{LastError, tail};
use crate::tier::surroundings::Surroundings;

/// Time to the first new attempt; doubled after each.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// Longest time between attempts.
const RETRY_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Attempt {
    opened: Option<Arc<DiskTier>>,
    last_error: Option<LastError>,
    /// A reset was asked for: it is made up for when the root opens.
    reset: bool,
    stop: bool,
}

/// The attempts to open a root.
#[derive(Debug)]
pub(crate) struct Pending {
    options: TierOptions,
    around: Surroundings,
    attempt: Mutex<Attempt>,
    wake: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Pending {
    /// Starts the thread that tries again; `first` is why the root is not usable now.
    ///
    /// # Errors
    /// `first` itself when it is about the options and no attempt could ever succeed;
    /// [`crate::error::ErrorKind::Unavailable`] when no thread can be started.
    pub(crate) fn start(
        options: TierOptions,
        around: Surroundings,
        first: &Error,
    ) -> Result<Arc<Self>> {
        around.notices.say(Level::Warning, "unusable", || {
            format!("the tier stores and loads nothing until its root can be used: {first}")
        });
        let attempt = Attempt {
            last_error: Some(open_error(&options, &around, first)),
            ..Attempt::default()
        };
        let pending = Arc::new(Self {
            options,
            around,
            attempt: Mutex::new(attempt),
            wake: Condvar::new(),
            thread: Mutex::default(),
        });
        let own = Arc::clone(&pending);
        let thread = spawn("kvstrata-opener", move || own.retry_loop()).map_err(|error| {
            Error::new(
                crate::error::ErrorKind::Unavailable,
                "the thread that opens the root again cannot be started",
            )
            .with_source(error)
        })?;
        *lock(&pending.thread) = Some(thread);
        Ok(pending)
    }

    fn retry_loop(&self) {
        let mut pause = RETRY_FIRST;
        loop {
            let attempt = lock(&self.attempt);
            if attempt.stop {
                return;
            }
            let attempt = wait_timeout(&self.wake, attempt, pause);
            if attempt.stop {
                return;
            }
            drop(attempt);
            let opened = DiskTier::open(&self.options, self.around.clone());
            let mut attempt = lock(&self.attempt);
            match opened {
                // What was stored before a reset must not be served: it is reset before it is.
                Ok(tier) if attempt.stop => {
                    drop(attempt);
                    // Nobody has used it: nothing can be busy.
                    let _ = tier.close(RETRY_FIRST);
                    return;
                }
                Ok(tier) => {
                    // The lock is not held over I/O: calls look for the tier under it.
                    while core::mem::take(&mut attempt.reset) {
                        drop(attempt);
                        let recorded = tier.reset().unwrap_or(false);
                        attempt = lock(&self.attempt);
                        if !recorded {
                            let error = Error::config("a reset could not be recorded");
                            attempt.last_error =
                                Some(open_error(&self.options, &self.around, &error));
                        }
                    }
                    self.around.notices.say(Level::Info, "usable", || {
                        format!("the root {} is usable now", self.options.root.display())
                    });
                    attempt.opened = Some(tier);
                    return;
                }
                Err(error) => {
                    attempt.last_error = Some(open_error(&self.options, &self.around, &error));
                }
            }
            pause = pause.saturating_mul(2).min(RETRY_MAX);
        }
    }

    /// The tier, once it could be opened.
    pub(crate) fn take(&self) -> Option<Arc<DiskTier>> {
        lock(&self.attempt).opened.clone()
    }

    /// Why the last attempt failed.
    pub(crate) fn last_error(&self) -> Option<LastError> {
        lock(&self.attempt).last_error.clone()
    }

    /// Remembers a reset; false while nothing is recorded on disk yet.
    pub(crate) fn reset(&self) -> bool {
        let opened = {
            let mut attempt = lock(&self.attempt);
            attempt.reset = true;
            attempt.opened.clone()
        };
        // Opened just now, whether anybody has taken it or not: it must not serve what it found.
        opened.is_some_and(|tier| tier.reset().unwrap_or(false))
    }

    /// Enters a job and ends it at once: stores are dropped, loads miss.
    ///
    /// # Errors
    /// As the open tier's.
    pub(crate) fn refuse(
        &self,
        job_id: JobId,
        kind: JobKind,
        keys: &[Key],
        offsets: &[u64],
    ) -> Result<()> {
        let row_bytes = |key: &Key| {
            self.options
                .row_bytes
                .get(&key.group())
                .and_then(|bytes| usize::try_from(*bytes).ok())
        };
        check_arguments(keys, offsets, self.around.arena.length(), row_bytes)?;
        let jobs = &self.around.jobs;
        jobs.begin(job_id, kind, keys.len())?;
        let outcome = match kind {
            JobKind::Store => Outcome::Dropped,
            JobKind::Load => Outcome::Miss,
        };
        let all: Vec<_> = (0..keys.len())
            .map(|position| Settlement::plain(position, outcome))
            .collect();
        self.around.metrics.offer(kind, keys.len());
        for _ in keys {
            self.around.metrics.count(kind, outcome);
        }
        jobs.settle(job_id, &all, Some("the root cannot be used yet"));
        Ok(())
    }

    /// Ends the attempts; a tier opened meanwhile is handed over to be closed.
    ///
    /// An attempt that hangs in the file system is left behind: it touches no arena.
    pub(crate) fn stop(&self) -> Option<Arc<DiskTier>> {
        lock(&self.attempt).stop = true;
        self.wake.notify_all();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread.filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
        self.take()
    }
}

/// Why the root could not be opened, in the form of every last error.
fn open_error(options: &TierOptions, around: &Surroundings, error: &Error) -> LastError {
    LastError {
        errno: error.errno().map_or("none", errno_name),
        operation: "open",
        path: tail(&options.root),
        text: error.to_string(),
        at: around.clock.now(),
    }
}
