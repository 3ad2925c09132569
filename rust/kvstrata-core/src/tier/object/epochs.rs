//! Epochs in a bucket: each is an object that is made before anything counts on it.

use futures_util::StreamExt;
use object_store::{ObjectStoreExt, PutMode, PutPayload};

use crate::format::row_table::EPOCH_LAST;
use crate::metrics::Counter;
use crate::object::epoch_record;
use crate::object::names::{Epoch, Names};
use crate::object::newest::Newest;
use crate::object::signing::put_of;
use crate::object::{Failure, FailureKind, Store};
use crate::tier::object::open::random;

/// Longest record that is read.
const RECORD_BYTES_MAX: u64 = 1024;
/// Numbers that are tried one after the other when others take them at the same time.
const TRIES_MAX: u32 = 64;

/// The epochs of one namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Epochs<'a> {
    pub(super) store: &'a Store,
    pub(super) names: &'a Names,
    /// Whether a PUT can be made to fail where an object is.
    pub(super) conditional_put: bool,
    /// Counts names that no object of ours has.
    pub(super) odd_names: &'a Counter,
}

/// The newest record.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    number: u32,
    /// The epoch; `None` where the record says nothing that makes sense.
    epoch: Option<Epoch>,
}

impl Epochs<'_> {
    /// The epoch that a process which opens a namespace works in: the newest, or a new one where
    /// records were lost.
    pub(super) async fn open(self) -> Result<Epoch, Failure> {
        let Some(recorded) = self.recorded().await? else {
            if self.newest_in_use(None).await?.is_some() {
                return self.advance(0).await;
            }
            let first = fresh(1)?;
            return match self.record(first).await {
                // Two that open at the same time: what counts is what is there.
                Err(failure) if failure.kind == FailureKind::Exists => self.reopen(None).await,
                made => made.map(|()| first),
            };
        };
        let Some(epoch) = recorded.epoch else {
            return self.advance(recorded.number).await;
        };
        // Where each number has one record, rows of the same number and another epoch are those of a
        // process that has outlived its record: nobody looks at them.
        let after = Epoch {
            suffix: if self.conditional_put {
                u64::MAX
            } else {
                epoch.suffix
            },
            ..epoch
        };
        match self.newest_in_use(Some(after)).await? {
            None => Ok(epoch),
            // Rows of a newer one: it has begun since its record was looked for, or that was lost.
            in_use => self.reopen(in_use).await,
        }
    }

    /// The newest epoch that is recorded, if it is not older than one that is in use; else a new one.
    async fn reopen(self, in_use: Option<Epoch>) -> Result<Epoch, Failure> {
        let recorded = self.recorded().await?;
        match recorded.and_then(|recorded| recorded.epoch) {
            Some(epoch) if Some(epoch) >= in_use => Ok(epoch),
            _ => self.advance(0).await,
        }
    }

    /// Makes an epoch newer than every other, and than the number `at_least`.
    pub(super) async fn advance(self, at_least: u32) -> Result<Epoch, Failure> {
        let recorded = self.recorded().await?;
        let number = recorded.map_or(0, |recorded| recorded.number);
        let after = recorded.map(|recorded| Epoch {
            number: recorded.number,
            suffix: u64::MAX,
        });
        let in_use = self.newest_in_use(after).await?;
        let last = in_use
            .map_or(0, |epoch| epoch.number)
            .max(number)
            .max(at_least);
        for step in 1..=TRIES_MAX {
            let number = last.saturating_add(step);
            if number > EPOCH_LAST {
                break;
            }
            let epoch = fresh(number)?;
            match self.record(epoch).await {
                // A peer's, or our own whose answer was lost: either way another one is newer.
                Err(failure) if failure.kind == FailureKind::Exists => {}
                made => return made.map(|()| epoch),
            }
        }
        let text = format!("no epoch after {last} is free");
        Err(Failure::new(FailureKind::Other, text))
    }

    /// The newest epoch that is recorded.
    async fn recorded(self) -> Result<Option<Recorded>, Failure> {
        let mut records = self.store.list(Some(&self.names.epochs()));
        let mut newest = Newest::default();
        while let Some(meta) = records.next().await {
            let meta = meta.map_err(|error| Failure::of(&error))?;
            let named = meta.location.filename().and_then(Epoch::parse);
            // What lies deeper is a stranger's: a copy that somebody keeps.
            let own = |named: &Epoch| self.names.record(*named, false) == meta.location;
            if let Some(named) = named.filter(own) {
                newest.meet(named);
            }
        }
        self.odd_names.add(newest.left_out());
        let Some(named) = newest.epoch() else {
            return Ok(None);
        };
        let number = named.number;
        if named.suffix != 0 {
            let epoch = Some(named);
            return Ok(Some(Recorded { number, epoch }));
        }
        let path = self.names.record(named, true);
        let read = self.store.get(&path).await;
        let read = read.map_err(|error| Failure::of(&error))?;
        let mut epoch = None;
        if read.meta.size <= RECORD_BYTES_MAX {
            let bytes = read.bytes().await;
            let bytes = bytes.map_err(|error| Failure::of(&error))?;
            epoch = epoch_record::parse(number, &bytes);
        }
        Ok(Some(Recorded { number, epoch }))
    }

    /// The newest epoch that any row is in and that is newer than `after`: from epoch to epoch, a
    /// page of names each, however many rows there are.
    async fn newest_in_use(self, after: Option<Epoch>) -> Result<Option<Epoch>, Failure> {
        let rows = self.names.rows();
        let mut newest = None;
        let mut from = after.map(|epoch| self.names.after_rows_of(epoch));
        loop {
            let mut listed = match &from {
                None => self.store.list(Some(&rows)),
                Some(from) => self.store.list_with_offset(Some(&rows), from),
            };
            // What is no row's name says nothing.
            let next = loop {
                let Some(meta) = listed.next().await else {
                    return Ok(newest);
                };
                let meta = meta.map_err(|error| Failure::of(&error))?;
                // A server that does not know where to begin names all of them.
                if from.as_ref().is_some_and(|from| meta.location <= *from) {
                    continue;
                }
                if let Some(epoch) = self.names.epoch_of(&meta.location) {
                    break epoch;
                }
            };
            let last = newest.max(after).map_or(0, |epoch| epoch.number);
            // All others are still further away.
            if !next.can_follow(last) {
                self.odd_names.add(1);
                return Ok(newest);
            }
            newest = newest.max(Some(next).filter(|_| Some(next) > after));
            from = Some(self.names.after_rows_of(next));
        }
    }

    async fn record(self, epoch: Epoch) -> Result<(), Failure> {
        let mode = if self.conditional_put {
            PutMode::Create
        } else {
            PutMode::Overwrite
        };
        let text = epoch_record::body(epoch);
        let options = put_of(mode, text.as_bytes());
        let path = self.names.record(epoch, self.conditional_put);
        let put = self.store.put_opts(&path, PutPayload::from(text), options);
        put.await.map(drop).map_err(|error| Failure::of(&error))
    }
}

/// An epoch of this number that nobody else has made or will make.
fn fresh(number: u32) -> Result<Epoch, Failure> {
    let suffix = u64::from_le_bytes(random()?).max(1);
    Ok(Epoch { number, suffix })
}
