//! Stores: each row is written straight from its slot, in one request.

use crate::error;
use crate::io::Direction;
use crate::job::{JobId, JobKind, Outcome, Settlement};
use crate::key::Key;
use crate::metrics::count;
use crate::object::transfer::{self, Mode, ReadFault, Row};
use crate::object::{Fact, Failure, FailureKind};
use crate::sys::sync::{Arc, lock};
use crate::tier::health::REFUSED;
use crate::tier::object::ObjectTier;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::load::tail_of;
use crate::tier::object::settle::End;
use crate::tier::object::state::Work;

/// What is at the place of a row that is to be stored.
enum There {
    /// The row itself, or at least its header, with its `ETag`.
    Row(Option<String>),
    /// Nothing.
    Nothing,
    /// Something else, with its `ETag`.
    Other(Option<String>),
    /// An object of a newer build.
    Newer,
}

impl ObjectTier {
    /// Begins a store; returns at once.
    ///
    /// # Errors
    /// `Argument` for a wrong argument, `Closed` after close; then nothing was begun.
    pub(super) fn begin_store(
        self: &Arc<Self>,
        job_id: JobId,
        keys: &[Key],
        offsets: &[u64],
    ) -> error::Result<()> {
        let (request, mut state) = self.begin(job_id, JobKind::Store, keys, offsets)?;
        if request.items.is_empty() {
            return Ok(());
        }
        let (open, bytes) = (state.store_bytes_open, request.bytes());
        state.store_bytes_open = open.saturating_add(bytes);
        let Some(place) = state.serving().map(Arc::clone) else {
            let why = "the bucket cannot be used yet";
            self.settle_all(&mut state, &request, Outcome::Dropped, why);
            return Ok(());
        };
        if open > 0 && open.saturating_add(bytes) > count(self.around.arena.length()) {
            let why = "too many bytes are being stored";
            self.settle_all(&mut state, &request, Outcome::Dropped, why);
            return Ok(());
        }
        if self.health.refuses(Direction::Write) {
            let dropped = &self.around.metrics.circuit_dropped_stores;
            dropped.add(count(keys.len()));
            self.settle_all(&mut state, &request, Outcome::Dropped, REFUSED);
            return Ok(());
        }
        let of: Vec<u64> = request
            .items
            .iter()
            .map(|item| item.fingerprint.half())
            .collect();
        let facts = self.verdicts.look(&of, self.around.clock.now());
        let is_there = |at: &usize| facts.get(*at) == Some(&Some(Fact::Verified));
        let (present, absent): (Vec<usize>, Vec<usize>) =
            (0..request.items.len()).partition(is_there);
        let admitted = self.admitted(&request.items);
        let is_taken = |at: &usize| admitted.get(*at).copied().unwrap_or(true);
        let (absent, refused): (Vec<usize>, Vec<usize>) = absent.into_iter().partition(is_taken);
        self.around
            .metrics
            .unadmitted_stores
            .add(count(refused.len()));
        state.enqueue(&request, &place, absent);
        let refused = refused
            .into_iter()
            .map(|at| Settlement::plain(at, Outcome::Dropped));
        let present = present
            .into_iter()
            .map(|at| Settlement::plain(at, Outcome::Present));
        let settled: Vec<_> = present.chain(refused).collect();
        self.settle(&mut state, &request, &settled, None);
        drop(state);
        self.watch.notify_one();
        self.pump();
        Ok(())
    }

    /// Writes a row from its slot. An object that was to be deleted still is where this fails.
    pub(super) async fn store_row(&self, work: &Work) -> End {
        let mut removed = false;
        let end = self.write_row(work, &mut removed).await;
        if removed && end.outcome != Outcome::Ok {
            self.delete_later(&mut lock(&self.state), work);
        }
        end
    }

    async fn write_row(&self, work: &Work, removed: &mut bool) -> End {
        let row = self.row_of(work);
        let of = work.item.fingerprint.half();
        let mut mode = match self.first_mode(work, &row, of, removed).await {
            Ok(mode) => mode,
            Err(end) => return end,
        };
        let mut attempts = self.attempts();
        loop {
            self.counters.row_requests.add(1);
            let begun = self.around.clock.now();
            let ended = self.put_once(work, &row, &mode).await;
            let now = self.around.clock.now();
            let took = now.saturating_duration_since(begun);
            self.around.metrics.latency.write.record(took);
            let failure = match ended {
                Ended::Done(Ok(())) => return self.stored(work, of, &mode),
                Ended::Done(Err(failure)) => failure,
                Ended::Late => return self.late_store(work),
                Ended::Stopped => return End::with(Outcome::Dropped, "closed"),
            };
            match failure.kind {
                FailureKind::Late => return self.late_store(work),
                // Someone says that it is there: believed only when its header says so, too.
                FailureKind::Exists | FailureKind::Changed if mode != Mode::Overwrite => {
                    mode = match self.what_is_there(work, &row).await {
                        Ok(There::Row(_)) => {
                            self.believe(work, Fact::Verified);
                            return End::plain(Outcome::Present);
                        }
                        Ok(There::Other(Some(tag))) if mode == Mode::Create => Mode::Replace(tag),
                        Ok(There::Other(_) | There::Nothing) => Mode::Overwrite,
                        Ok(There::Newer) => return self.newer_there(work),
                        Err(end) => return end,
                    };
                }
                FailureKind::Unsupported if mode != Mode::Overwrite => mode = Mode::Overwrite,
                _ if self.retry(&mut attempts, work, &failure).await => {}
                _ => return self.failed_store(&row, &failure),
            }
        }
    }

    /// One request. Its slot is not read any more when this returns, even if that takes longer
    /// than the request.
    async fn put_once(&self, work: &Work, row: &Row, mode: &Mode) -> Ended<Result<(), Failure>> {
        let mut stop = self.stop.subscribe();
        if *stop.borrow_and_update() {
            return Ended::Stopped;
        }
        let deadline = work.request.deadline;
        let arena = &self.around.arena;
        Ended::Done(transfer::put(&work.place.store, arena, row, mode, deadline, stop).await)
    }

    /// How to begin: what was removed is overwritten; what was listed, or is known to be foreign, is
    /// looked at.
    async fn first_mode(
        &self,
        work: &Work,
        row: &Row,
        of: u64,
        removed: &mut bool,
    ) -> Result<Mode, End> {
        *removed = match self.until_deleted(work).await {
            Ended::Done(removed) => removed,
            Ended::Late => return Err(self.late_store(work)),
            Ended::Stopped => return Err(End::with(Outcome::Dropped, "closed")),
        };
        if *removed {
            return Ok(Mode::Overwrite);
        }
        let foreign = lock(&self.state).foreign.contains_key(&of);
        let conditional = work.place.conditional_put;
        let fact = self.verdicts.of(of, self.around.clock.now());
        if fact == Some(Fact::Verified) {
            return Err(End::plain(Outcome::Present));
        }
        if conditional && !foreign && fact != Some(Fact::Listed) {
            return Ok(Mode::Create);
        }
        Ok(match self.what_is_there(work, row).await? {
            There::Row(_) if !foreign => {
                self.believe(work, Fact::Verified);
                return Err(End::plain(Outcome::Present));
            }
            There::Nothing if conditional => Mode::Create,
            // A foreign object's header may be right, and its payload not.
            There::Row(Some(tag)) | There::Other(Some(tag)) if conditional => Mode::Replace(tag),
            There::Row(_) | There::Nothing | There::Other(_) => Mode::Overwrite,
            There::Newer => return Err(self.newer_there(work)),
        })
    }

    /// The row cannot be stored where an object of a newer build is, which others may read.
    fn newer_there(&self, work: &Work) -> End {
        self.note_newer(work);
        End::with(Outcome::Dropped, "an object of a newer version is there")
    }

    /// Reads the header of what is at a row's place.
    async fn what_is_there(&self, work: &Work, row: &Row) -> Result<There, End> {
        let mut attempts = self.attempts();
        loop {
            let read = transfer::get_header(&work.place.store, row);
            match self.until(work.request.deadline, read).await {
                Ended::Done(Ok(tag)) => return Ok(There::Row(tag)),
                Ended::Done(Err(ReadFault::Foreign(tag, _))) => return Ok(There::Other(tag)),
                Ended::Done(Err(ReadFault::Newer)) => return Ok(There::Newer),
                Ended::Done(Err(ReadFault::Failed(failure))) => match failure.kind {
                    FailureKind::Missing => return Ok(There::Nothing),
                    _ if self.retry(&mut attempts, work, &failure).await => {}
                    _ => return Err(self.failed_store(row, &failure)),
                },
                Ended::Late => return Err(self.late_store(work)),
                Ended::Stopped => return Err(End::with(Outcome::Dropped, "closed")),
            }
        }
    }

    fn stored(&self, work: &Work, of: u64, mode: &Mode) -> End {
        self.health.succeed(Direction::Write);
        let mut state = lock(&self.state);
        state.retries.earn();
        let healed = state.foreign.remove(&of).is_some() || matches!(mode, Mode::Replace(_));
        drop(state);
        self.counters.healed_objects.add(u64::from(healed));
        let metrics = &self.around.metrics;
        metrics.bytes_written.add(count(work.item.row_bytes));
        self.believe(work, Fact::Verified);
        End::plain(Outcome::Ok)
    }

    fn late_store(&self, work: &Work) -> End {
        self.note_late(&work.request);
        End::with(Outcome::Timeout, "no answer by the deadline")
    }

    fn failed_store(&self, row: &Row, failure: &Failure) -> End {
        self.server_failed(Direction::Write, failure, "put", &tail_of(row));
        self.say_failed("store", failure, row);
        let outcome = if failure.kind == FailureKind::Full {
            Outcome::NoSpace
        } else {
            Outcome::IoError
        };
        End::with(outcome, failure.to_string())
    }
}
