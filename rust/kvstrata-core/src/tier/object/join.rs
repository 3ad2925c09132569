//! Taking a bucket into use: it is tried out, the manifest is compared, the epoch is read.

use core::time::Duration;
use std::path::Path as FilePath;
use std::time::Instant;

use object_store::{ObjectStoreExt, PutMode, PutPayload};

use crate::error::{Error, Result};
use crate::namespace::directory::{FILE_BYTES_MAX, compare, file_text, parse};
use crate::notice::Level;
use crate::object::probe::BucketFacts;
use crate::object::reach::{Reached, Way};
use crate::object::signing::put_of;
use crate::object::{Fact, Failure, FailureKind, Store};
use crate::sys::sync::{Arc, Mutex, lock};
use crate::tier::last_error::LastError;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::{ObjectTier, Place};
use crate::tier::phase::Phase;

/// Time to the first new attempt; doubled after each.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// Longest time between attempts.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Longest time of one attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(20);
/// First pause of a start that tries again; doubled after each attempt.
const PATIENCE_FIRST: Duration = Duration::from_millis(250);

/// What the last attempt failed by, where it was a request.
type Failed = Mutex<Option<FailureKind>>;

impl ObjectTier {
    /// Tries to take the bucket into use.
    ///
    /// # Errors
    /// `Config`, saying precisely what is wrong with it.
    async fn join(&self) -> Result<Place> {
        self.join_by(self.attempt_end(), &Mutex::default()).await
    }

    /// Tries to take the bucket into use, again where a failure is hardly there to stay: one answer
    /// of a busy server should not keep an engine from starting. All attempts together take as long
    /// as one may.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(super) async fn join_now(&self) -> Result<Place> {
        let late = self.attempt_end();
        let mut pause = PATIENCE_FIRST;
        let mut left = self.options.limits.attempts_max;
        loop {
            let failed = Failed::default();
            let joined = self.join_by(late, &failed).await;
            left = left.saturating_sub(1);
            let passes = lock(&failed).is_some_and(FailureKind::is_worth_a_retry);
            if joined.is_ok() || !passes || left == 0 {
                return joined;
            }
            let over = self.until(late, tokio::time::sleep(pause)).await;
            if !matches!(over, Ended::Done(())) {
                return joined;
            }
            pause = pause.saturating_mul(2);
        }
    }

    fn attempt_end(&self) -> Instant {
        let now = self.around.clock.now();
        let longest = self.options.deadline.min(ATTEMPT_MAX);
        now.checked_add(longest).unwrap_or(now)
    }

    async fn join_by(&self, late: Instant, failed: &Failed) -> Result<Place> {
        match self.until(late, self.join_once(failed)).await {
            Ended::Done(joined) => joined,
            Ended::Late => Err(self.options.unusable("open", &Failure::late())),
            Ended::Stopped => Err(Error::config("the tier was closed")),
        }
    }

    /// The error of a bucket that cannot be used, whose failure is noted.
    fn unusable(&self, what: &str, failure: &Failure, failed: &Failed) -> Error {
        *lock(failed) = Some(failure.kind);
        self.options.unusable(what, failure)
    }

    async fn join_once(&self, failed: &Failed) -> Result<Place> {
        let way = Way {
            options: &self.options,
            given: self.given.as_ref(),
            clock: &self.around.clock,
            odd_names: &self.odd_names,
        };
        let try_out = |store: Store| async move {
            let tried = self.probes.try_out(&store).await;
            *lock(failed) = tried.as_ref().err().map(|failure| failure.kind);
            tried
        };
        let Reached {
            store,
            facts,
            style,
        } = way.reach("use", try_out).await?;
        self.compare_manifest(&store, facts, failed).await?;
        let epoch = self.epochs(&store, facts.conditional_put).open().await;
        let wrong = |failure| self.unusable("read the epochs of", &failure, failed);
        let epoch = epoch.map_err(wrong)?;
        Ok(Place {
            store,
            epoch,
            conditional_put: facts.conditional_put,
            style,
        })
    }

    /// Writes the manifest where there is none, reads it back, and compares it with ours.
    async fn compare_manifest(
        &self,
        store: &Store,
        facts: BucketFacts,
        failed: &Failed,
    ) -> Result<()> {
        let path = self.names.manifest();
        let shown = format!(
            "{}://{}/{path}",
            self.options.location.scheme.as_str(),
            self.options.location.bucket
        );
        let wrong = |failure: Failure| self.unusable("read the manifest of", &failure, failed);
        let mut read = store.get(&path).await.map_err(|error| Failure::of(&error));
        if matches!(&read, Err(failure) if failure.kind == FailureKind::Missing) {
            let mode = if facts.conditional_put {
                PutMode::Create
            } else {
                PutMode::Overwrite
            };
            let text = file_text(&self.manifest);
            let options = put_of(mode, text.as_bytes());
            let body = PutPayload::from(text);
            let put = store.put_opts(&path, body, options).await;
            match put.map_err(|error| Failure::of(&error)) {
                // A peer was quicker: what counts is what is read next.
                Err(failure) if failure.kind != FailureKind::Exists => return Err(wrong(failure)),
                _ => {}
            }
            read = store.get(&path).await.map_err(|error| Failure::of(&error));
        }
        let found = read.map_err(wrong)?;
        let longest = u64::try_from(FILE_BYTES_MAX).unwrap_or(u64::MAX);
        if found.meta.size > longest {
            return Err(Error::config(format!(
                "{shown} is larger than any manifest"
            )));
        }
        let bytes = found.bytes().await;
        let bytes = bytes.map_err(|error| wrong(Failure::of(&error)))?;
        let shown = FilePath::new(&shown);
        compare(shown, &self.manifest, &parse(shown, &bytes)?)
    }

    /// Tries again and again until the bucket can be used; runs until then, or until the tier
    /// stops.
    pub(super) async fn join_later(self: Arc<Self>) {
        let mut pause = RETRY_FIRST;
        loop {
            match self.join().await {
                Ok(place) => match self.take_up(place).await {
                    Ok(()) => return,
                    Err(failure) => self.remember_open(&failure.to_string(), failure.kind.name()),
                },
                Err(error) => self.remember_open(&error.to_string(), "open"),
            }
            let now = self.around.clock.now();
            let until = now.checked_add(pause).unwrap_or(now);
            if let Ended::Stopped = self.until(until, core::future::pending::<()>()).await {
                return;
            }
            pause = pause.saturating_mul(2).min(RETRY_MAX);
        }
    }

    /// Begins to serve what is there; a reset that was asked for before is made up for first.
    pub(super) async fn take_up(
        self: &Arc<Self>,
        mut place: Place,
    ) -> core::result::Result<(), Failure> {
        while self.owes_reset(&place) {
            let now = self.around.clock.now();
            let longest = self.options.deadline.min(ATTEMPT_MAX);
            let late = now.checked_add(longest).unwrap_or(now);
            let conditional = place.conditional_put;
            let newer = self.epochs(&place.store, conditional).advance(0);
            let advanced = match self.until(late, newer).await {
                Ended::Done(advanced) => advanced,
                Ended::Late | Ended::Stopped => Err(Failure::late()),
            };
            match advanced {
                Ok(epoch) => place.epoch = epoch,
                Err(failure) => {
                    lock(&self.state).reset_wanted = true;
                    return Err(failure);
                }
            }
        }
        self.begin_deleting();
        self.list.notify_one();
        self.around.notices.say(Level::Info, "usable", || {
            format!("{} is in use", self.options.location)
        });
        Ok(())
    }

    /// Serves `place` from here on, unless a reset is owed: says so then, and takes the debt.
    fn owes_reset(&self, place: &Place) -> bool {
        let mut state = lock(&self.state);
        let owed = core::mem::take(&mut state.reset_wanted);
        if !owed && state.phase == Phase::Open {
            let place = Arc::new(place.clone());
            let now = self.around.clock.now();
            for of in state.deletions.take_up(&place) {
                self.verdicts.note(of, Fact::Absent, now);
            }
            state.place = Some(place);
            state.reset_failed = false;
        }
        owed
    }

    /// Notes why the bucket cannot be used.
    pub(super) fn remember_open(&self, text: &str, name: &'static str) {
        self.health.remember(LastError {
            errno: name,
            operation: "open",
            path: self.options.location.to_string(),
            text: text.to_owned(),
            at: self.around.clock.now(),
        });
        self.around.notices.say(Level::Warning, "unusable", || {
            format!("the tier stores and loads nothing until its bucket can be used: {text}")
        });
    }
}
