//! Loads: each row is read into its slot and verified there.

use core::time::Duration;

use crate::error::Result;
use crate::format::combined::Shift;
use crate::io::Direction;
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::metrics::count;
use crate::notice::Level;
use crate::object::transfer::{self, ReadFault, Row};
use crate::object::{Fact, Failure, FailureKind};
use crate::sys::sync::{Arc, MutexGuard, lock};
use crate::tier::arguments::check_arguments;
use crate::tier::health::REFUSED;
use crate::tier::last_error::tail;
use crate::tier::object::ObjectTier;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::settle::End;
use crate::tier::object::state::{State, Work};
use crate::tier::request::{Item, Request};

/// Longest time for which a load waits for the deletion of what it found in its row's place.
const DELETION_MAX: Duration = Duration::from_secs(1);

/// Attempts at one operation: how many were made, and how long the next pause is.
pub(super) struct Attempts {
    made: u32,
    pause: Duration,
}

impl ObjectTier {
    /// The lock, while the tier takes calls.
    pub(super) fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = lock(&self.state);
        state.phase.require_open()?;
        Ok(state)
    }

    /// Checks a job's arguments and enters it.
    pub(super) fn begin(
        &self,
        job_id: JobId,
        kind: JobKind,
        keys: &[Key],
        offsets: &[u64],
    ) -> Result<(Arc<Request>, MutexGuard<'_, State>)> {
        let slots = check_arguments(keys, offsets, self.around.arena.length(), |key| {
            self.row_bytes.get(&key.group()).copied()
        })?;
        let items = Item::all(keys, slots, &self.fingerprinter);
        let state = self.open_state()?;
        let now = self.around.clock.now();
        let deadline = now.checked_add(self.options.deadline).unwrap_or(now);
        let request = Arc::new(Request::new(job_id, kind, items, deadline));
        self.around.jobs.begin(job_id, kind, keys.len())?;
        self.around.metrics.offer(kind, keys.len());
        Ok((request, state))
    }

    /// Begins a load; returns at once.
    ///
    /// # Errors
    /// `Argument` for a wrong argument, `Closed` after close; then nothing was begun.
    pub(super) fn begin_load(
        self: &Arc<Self>,
        job_id: JobId,
        keys: &[Key],
        offsets: &[u64],
    ) -> Result<()> {
        let (request, mut state) = self.begin(job_id, JobKind::Load, keys, offsets)?;
        if request.items.is_empty() {
            return Ok(());
        }
        let (open, bytes) = (state.load_bytes_open, request.bytes());
        state.load_bytes_open = open.saturating_add(bytes);
        let metrics = &self.around.metrics;
        let Some(place) = state.serving().map(Arc::clone) else {
            let why = "the bucket cannot be used yet";
            self.settle_all(&mut state, &request, Outcome::Miss, why);
            return Ok(());
        };
        if open > 0 && open.saturating_add(bytes) > count(self.around.arena.length()) {
            metrics.refused_loads.add(count(keys.len()));
            let why = "too many bytes are being loaded";
            self.settle_all(&mut state, &request, Outcome::Miss, why);
            return Ok(());
        }
        if self.health.refuses(Direction::Read) {
            metrics.circuit_missed_loads.add(count(keys.len()));
            self.settle_all(&mut state, &request, Outcome::Miss, REFUSED);
            return Ok(());
        }
        let (removed, there): (Vec<usize>, Vec<usize>) = (0..request.items.len()).partition(|at| {
            let item = request.items.get(*at);
            item.is_some_and(|item| state.deletions.hides(item.fingerprint.half()))
        });
        state.enqueue(&request, &place, there);
        let removed = removed
            .into_iter()
            .map(|at| Settlement::plain(at, Outcome::Miss));
        let removed: Vec<_> = removed.collect();
        self.settle(&mut state, &request, &removed, None);
        drop(state);
        self.watch.notify_one();
        self.pump();
        Ok(())
    }

    /// The row of some work, by its name.
    pub(super) fn row_of(&self, work: &Work) -> Row {
        Row {
            path: self.names.row(work.place.epoch, &work.item.key),
            namespace: self.digest,
            epoch: work.place.epoch,
            key: work.item.key,
            offset: work.item.offset,
            row_bytes: work.item.row_bytes,
            shift: match self.shifts.get(&work.item.row_bytes) {
                Some(shift) => *shift,
                None => Shift::over(count(work.item.row_bytes)),
            },
        }
    }

    pub(super) const fn attempts(&self) -> Attempts {
        Attempts {
            made: 1,
            pause: self.options.limits.retry_pause,
        }
    }

    /// Whether another attempt is to be made after `failure`; if so, the pause before it is over
    /// when this returns.
    pub(super) async fn retry(
        &self,
        attempts: &mut Attempts,
        work: &Work,
        failure: &Failure,
    ) -> bool {
        // A pause of the peer or of the network, which has cost a tenth of the deadline already: no
        // more of these fit in it than may be made.
        let stalled = failure.kind == FailureKind::Stalled;
        let enough = attempts.made >= self.options.limits.attempts_max;
        if !failure.kind.is_worth_a_retry() || (enough && !stalled) {
            return false;
        }
        if !stalled {
            if !lock(&self.state).retries.spend() {
                self.counters.retries_refused.add(1);
                return false;
            }
            attempts.made = attempts.made.saturating_add(1);
        }
        // Half of the pause for certain, so that a busy server gets a rest; the rest by chance.
        let half = attempts.pause.checked_div(2).unwrap_or_default();
        let pause = half.saturating_add(half.mul_f64(super::open::chance()));
        attempts.pause = attempts.pause.saturating_mul(2);
        let over = self
            .until(work.request.deadline, tokio::time::sleep(pause))
            .await;
        let over = matches!(over, Ended::Done(()));
        self.counters.retries.add(u64::from(over));
        over
    }

    /// Reads a row into its slot.
    pub(super) async fn load_row(&self, work: &Work) -> End {
        let row = self.row_of(work);
        let mut attempts = self.attempts();
        let mut seen_foreign = false;
        loop {
            self.counters.row_requests.add(1);
            let begun = self.around.clock.now();
            let read = transfer::get(&work.place.store, &self.around.arena, &row);
            let ended = self.until(work.request.deadline, read).await;
            let now = self.around.clock.now();
            self.around
                .metrics
                .latency
                .read
                .record(now.saturating_duration_since(begun));
            let fault = match ended {
                Ended::Done(Ok(())) => {
                    self.health.succeed(Direction::Read);
                    lock(&self.state).retries.earn();
                    self.believe(work, Fact::Verified);
                    return End::plain(Outcome::Ok);
                }
                Ended::Done(Err(fault)) => fault,
                Ended::Late => {
                    self.note_late(&work.request);
                    self.disbelieve(work);
                    return End::with(Outcome::Timeout, "no answer by the deadline");
                }
                Ended::Stopped => return End::with(Outcome::Timeout, "closed"),
            };
            match fault {
                // What was wrong may have been the way here.
                ReadFault::Foreign(..) if !seen_foreign => seen_foreign = true,
                ReadFault::Foreign(tag, why) => {
                    return self.foreign_row(work, &row, tag.as_deref(), why).await;
                }
                ReadFault::Newer => {
                    self.health.succeed(Direction::Read);
                    self.note_newer(work);
                    return End::with(Outcome::Miss, "an object of a newer version is there");
                }
                ReadFault::Failed(failure) => match failure.kind {
                    FailureKind::Missing => {
                        self.health.succeed(Direction::Read);
                        self.believe(work, Fact::Absent);
                        return End::plain(Outcome::Miss);
                    }
                    FailureKind::Denied => {
                        self.counters.denied_reads.add(1);
                        self.server_failed(Direction::Read, &failure, "get", &tail_of(&row));
                        self.believe(work, Fact::Absent);
                        return End::with(Outcome::Miss, failure.to_string());
                    }
                    _ if self.retry(&mut attempts, work, &failure).await => {}
                    _ => {
                        self.server_failed(Direction::Read, &failure, "get", &tail_of(&row));
                        self.say_failed("load", &failure, &row);
                        self.disbelieve(work);
                        return End::with(Outcome::IoError, failure.to_string());
                    }
                },
            }
        }
    }

    /// An object that is not its row: a miss from now on, deleted, and overwritten by the next
    /// store. The load ends after the deletion, which therefore does not hit what the caller stores
    /// when it has heard of the load.
    async fn foreign_row(
        &self,
        work: &Work,
        row: &Row,
        tag: Option<&str>,
        why: &'static str,
    ) -> End {
        self.health.succeed(Direction::Read);
        self.around.metrics.corrupt_rows.add(1);
        let name = tail_of(row);
        self.around.notices.say(Level::Warning, "mismatch", || {
            format!("object {name} {why}; it counts as a miss and is deleted")
        });
        {
            let mut state = lock(&self.state);
            if state.generation == work.generation {
                state.mark_foreign(work.item.fingerprint.half());
            }
        }
        self.believe(work, Fact::Absent);
        let now = self.around.clock.now();
        let until = now.checked_add(DELETION_MAX).unwrap_or(now);
        let deletion = transfer::delete_if(&work.place.store, &row.path, tag);
        // One that stays is overwritten by the next store.
        let ended = self.until(until.min(work.request.deadline), deletion);
        drop(ended.await);
        End::with(Outcome::Corrupt, format!("the object {why}"))
    }

    /// An object of a newer build is in a row's place: a miss, left alone by us.
    pub(super) fn note_newer(&self, work: &Work) {
        let now = self.around.clock.now();
        self.counters.newer_objects.add(1);
        {
            let mut state = lock(&self.state);
            if state.generation == work.generation {
                state.mark_newer(work.item.fingerprint.half(), now);
            }
        }
        self.believe(work, Fact::Absent);
        self.around.notices.say(Level::Warning, "newer", || {
            "objects of a newer version of kvstrata are in this namespace; they count as misses \
             and are left alone"
                .to_owned()
        });
    }

    /// Notes what was found out about the row of some work, unless a reset came between; that it is
    /// there only if it was not removed meanwhile.
    pub(super) fn believe(&self, work: &Work, fact: Fact) {
        let state = lock(&self.state);
        let removed = fact != Fact::Absent && state.was_removed(work);
        if state.generation == work.generation && !removed {
            let of = work.item.fingerprint.half();
            self.verdicts.note(of, fact, self.around.clock.now());
        }
    }

    /// After a load failed its key is a miss for everyone; not where reads are given up, for then
    /// everything is, and the rows may be as good as ever afterwards.
    fn disbelieve(&self, work: &Work) {
        if !self.health.refuses(Direction::Read) {
            self.believe(work, Fact::Absent);
        }
    }

    /// Logs that an operation on a row failed.
    pub(super) fn say_failed(&self, subject: &'static str, failure: &Failure, row: &Row) {
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Warning, subject, || {
            format!("{subject} of {} failed ({failure})", tail_of(row))
        });
    }
}

/// The end of a row's name.
pub(super) fn tail_of(row: &Row) -> String {
    tail(std::path::Path::new(row.path.as_ref()))
}
