//! A listing to its end, whatever fails on the way: what is worth another attempt is tried again.

use core::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{BoxStream, ReadyChunks};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};

use crate::object::{Failure, FailureKind, Store};

/// Names that are looked at together.
const BATCH_NAMES: usize = 256;
/// First and longest pause before another attempt; each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

type Listed = ReadyChunks<BoxStream<'static, object_store::Result<ObjectMeta>>>;

/// The names below one, some at a time.
pub(super) struct Pages {
    store: Store,
    below: Option<Path>,
    /// How long a page may take, all attempts at it together.
    deadline: Duration,
    listed: Listed,
    /// The last name that came: another attempt goes on behind it.
    last: Option<Path>,
    /// Where this attempt goes on: names up to it were handed out. Servers may not know of that.
    after: Option<Path>,
    /// What ended the listing behind the names that were handed out.
    failed: Option<Failure>,
    circle: Circle,
}

impl Pages {
    pub(super) fn new(store: Store, below: Option<Path>, deadline: Duration) -> Self {
        let listed = store.list(below.as_ref()).ready_chunks(BATCH_NAMES);
        Self {
            store,
            below,
            deadline,
            listed,
            last: None,
            after: None,
            failed: None,
            circle: Circle::default(),
        }
    }

    /// Whether there is a first page, in so many attempts: a server that was never there is not
    /// waited for as one that was.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub(super) async fn probe(mut self, attempts_max: u32) -> Result<(), Failure> {
        self.next_within(attempts_max).await.map(drop)
    }

    /// The next names, none twice; `None` at the end.
    ///
    /// # Errors
    /// What the last attempt failed with: there is no other for what would not go better, nor when
    /// the time of a page is over.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<ObjectMeta>>, Failure> {
        self.next_within(u32::MAX).await
    }

    async fn next_within(&mut self, attempts_max: u32) -> Result<Option<Vec<ObjectMeta>>, Failure> {
        let (deadline, mut last_failure) = (self.deadline, None);
        let attempts = self.attempts(attempts_max, &mut last_failure);
        match tokio::time::timeout(deadline, attempts).await {
            Ok(done) => done,
            Err(_) => Err(last_failure.unwrap_or_else(Failure::late)),
        }
    }

    async fn attempts(
        &mut self,
        attempts_max: u32,
        last_failure: &mut Option<Failure>,
    ) -> Result<Option<Vec<ObjectMeta>>, Failure> {
        let mut pause = PAUSE_MIN;
        let mut left = attempts_max;
        loop {
            let failure = match self.failed.take() {
                Some(failure) => failure,
                None => match self.listed.next().await {
                    None => return Ok(None),
                    Some(batch) => {
                        let names = self.take(batch)?;
                        if !names.is_empty() {
                            return Ok(Some(names));
                        }
                        match self.failed.take() {
                            Some(failure) => failure,
                            None => continue,
                        }
                    }
                },
            };
            left = left.saturating_sub(1);
            if left == 0 || !failure.kind.is_worth_a_retry() {
                return Err(failure);
            }
            *last_failure = Some(failure);
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(PAUSE_MAX);
            self.begin_again();
        }
    }

    /// The names of a batch; what ended it is for the next call.
    fn take(
        &mut self,
        batch: Vec<object_store::Result<ObjectMeta>>,
    ) -> Result<Vec<ObjectMeta>, Failure> {
        let mut names = Vec::with_capacity(batch.len());
        for meta in batch {
            let meta = match meta {
                Ok(meta) => meta,
                Err(error) => {
                    self.failed = Some(Failure::of(&error));
                    break;
                }
            };
            if self.after.as_ref() >= Some(&meta.location) {
                continue;
            }
            if self.circle.closes_at(&meta.location) {
                let text = "the listing names the same objects again and again";
                return Err(Failure::new(FailureKind::Other, text));
            }
            names.push(meta);
        }
        if let Some(last) = names.last() {
            self.last = Some(last.location.clone());
        }
        Ok(names)
    }

    /// Lists what follows the last name.
    fn begin_again(&mut self) {
        let below = self.below.as_ref();
        let listed = match &self.last {
            Some(last) => self.store.list_with_offset(below, last),
            None => self.store.list(below),
        };
        self.listed = listed.ready_chunks(BATCH_NAMES);
        self.after.clone_from(&self.last);
    }
}

/// Notices a listing that goes in a circle, without keeping its names: one name is looked out for,
/// another one after twice as many each time.
#[derive(Default)]
struct Circle {
    name: Option<Path>,
    seen: u64,
}

impl Circle {
    fn closes_at(&mut self, name: &Path) -> bool {
        let closes = self.name.as_ref() == Some(name);
        self.seen = self.seen.saturating_add(1);
        if self.seen.is_power_of_two() {
            self.name = Some(name.clone());
        }
        closes
    }
}
