//! Removing rows from a bucket: whole idle namespaces first, then the oldest rows.
//!
//! The bucket is listed twice: rows are counted, and then those removed that were chosen by the
//! count. No names are kept, so that memory does not grow with the rows.
//!
//! Safe beside running engines: a row that is gone is a miss, and stored again. Manifests and
//! records of epochs stay: without a record, rows that were reset could come back.

use core::cell::{Cell, RefCell};
use core::future::Future;
use core::pin::pin;
use core::time::Duration;
use std::collections::BTreeMap;

use futures_util::StreamExt;
use futures_util::future::{Either, select};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::runtime::Builder;

use crate::error::{Error, ErrorKind, Result};
use crate::namespace::layout::{ROWS_NAME, is_directory_name};
use crate::object::census::{Census, Choice, seconds};
use crate::object::names::parse_row;
use crate::object::pages::Pages;
use crate::object::probe::PROBE_PREFIX;
use crate::object::reach::Way;
use crate::object::{Failure, FailureKind, ObjectOptions, Store};
use crate::sys::clock::Clock;
use crate::sys::sync::Arc;

/// Deletions at a time.
const DELETIONS: usize = 16;
/// Deletions that may fail one after the other before no more are tried.
const FAILURES_MAX: usize = 4 * DELETIONS;
/// How often it is asked whether to go on.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// What a start has tried out and left behind is removed after this time.
const PROBES_AFTER: Duration = Duration::from_hours(1);

/// What is to be removed.
#[derive(Clone, Copy, Debug, Default)]
pub struct GcOptions {
    /// Rows are removed until no more than so many bytes of them are left.
    pub capacity_bytes: Option<u64>,
    /// Rows that were stored longer ago than this are removed.
    pub older_than: Option<Duration>,
    /// Nothing is removed; the report is as if.
    pub dry_run: bool,
    /// How long it may take; each request has the options' deadline besides.
    pub time_limit: Option<Duration>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GcEnd {
    /// Everything that was to be done was tried.
    #[default]
    Done,
    /// The time that it was given is over.
    TimeLimit,
    /// It was told to stop.
    Interrupted,
    /// The bucket could not be listed to its end while rows were being removed.
    NotListed,
}

impl GcEnd {
    /// The word in the report.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::TimeLimit => "time limit",
            Self::Interrupted => "interrupted",
            Self::NotListed => "not listed to the end",
        }
    }
}

/// What was removed, and what is left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Rows removed.
    pub removed_rows: u64,
    /// Their bytes, headers included.
    pub removed_bytes: u64,
    /// Rows that were to be removed and could not be.
    pub failed_rows: u64,
    /// Why the last of them could not.
    pub last_error: Option<String>,
    /// Rows left, those among them that were to be removed and were not reached.
    pub kept_rows: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// Namespaces of which all rows were removed.
    pub emptied: Vec<String>,
    /// Objects with names that none of ours has: left alone.
    pub odd_names: u64,
    /// How it ended.
    pub end: GcEnd,
}

/// One run: what it is told, and what it has done so far.
struct Run<'a> {
    options: &'a ObjectOptions,
    what: GcOptions,
    /// Seconds since 1970.
    now: i64,
    report: &'a RefCell<GcReport>,
    /// Rows that are left, by namespace.
    left: RefCell<BTreeMap<String, u64>>,
    failed_in_a_row: Cell<usize>,
}

/// A row in a bucket.
struct Found {
    namespace: String,
    path: Path,
    bytes: u64,
    /// Seconds since 1970.
    stored_at: i64,
}

impl Run<'_> {
    async fn collect(&self, way: Way<'_>) -> Result<GcEnd> {
        let prefix = self.prefix();
        let first_page = |store: Store| {
            let pages = Pages::new(store, prefix.clone(), self.options.deadline);
            async move { pages.probe(self.options.limits.attempts_max).await }
        };
        let store = way.reach("list", first_page).await?.store;
        let counted = self.count(&store).await;
        let choice = counted.map_err(|failure| self.options.unusable("list", &failure))?;
        *self.left.borrow_mut() = choice.rows();
        let removed = self.remove_all(&store, &choice).await;
        let Err(failure) = removed else {
            return Ok(GcEnd::Done);
        };
        let mut report = self.report.borrow_mut();
        report.last_error = Some(failure.to_string());
        Ok(GcEnd::NotListed)
    }

    /// Counts all rows, and says which go.
    async fn count(&self, store: &Store) -> core::result::Result<Choice, Failure> {
        let before = match self.what.older_than {
            Some(older_than) => self.now.saturating_sub(seconds(older_than)),
            None => i64::MIN,
        };
        let census = RefCell::new(Census::new(before));
        self.walk(store, self.prefix(), async |rows| {
            let mut report = self.report.borrow_mut();
            for row in rows {
                report.kept_rows = report.kept_rows.saturating_add(1);
                report.kept_bytes = report.kept_bytes.saturating_add(row.bytes);
                let mut census = census.borrow_mut();
                census.count(&row.namespace, row.bytes, row.stored_at);
            }
        })
        .await?;
        let census = census.into_inner();
        Ok(census.choose(self.what.capacity_bytes, self.now))
    }

    /// Removes what goes.
    async fn remove_all(
        &self,
        store: &Store,
        choice: &Choice,
    ) -> core::result::Result<(), Failure> {
        for (namespace, newest) in choice.whole() {
            let below = Path::from(self.options.location.below(namespace));
            self.walk(store, Some(below), async |mut rows| {
                rows.retain(|row| row.namespace == *namespace && row.stored_at <= *newest);
                self.remove(store, rows).await;
            })
            .await?;
        }
        if !choice.takes_others() {
            return Ok(());
        }
        self.walk(store, self.prefix(), async |mut rows| {
            rows.retain(|row| choice.takes(&row.namespace, row.bytes, row.stored_at));
            self.remove(store, rows).await;
        })
        .await
    }

    /// Waits for one request, no longer than it may take.
    async fn in_time<T>(&self, work: impl Future<Output = T>) -> core::result::Result<T, Failure> {
        let done = tokio::time::timeout(self.options.deadline, work).await;
        done.map_err(|_| Failure::late())
    }

    fn prefix(&self) -> Option<Path> {
        let prefix = &self.options.location.prefix;
        (!prefix.is_empty()).then(|| Path::from(prefix.as_str()))
    }

    /// Hands over the rows below a name, some at a time. Probes that were left go on the way.
    async fn walk(
        &self,
        store: &Store,
        below: Option<Path>,
        mut each: impl AsyncFnMut(Vec<Found>),
    ) -> core::result::Result<(), Failure> {
        let mut pages = Pages::new(Arc::clone(store), below, self.options.deadline);
        let depth = self.prefix().map_or(0, |prefix| prefix.parts_count());
        while let Some(batch) = pages.next().await? {
            let mut rows = Vec::new();
            for meta in batch {
                match self.what_is(meta, depth) {
                    Some(Thing::Row(row)) => rows.push(row),
                    Some(Thing::Probe(probe)) if !self.what.dry_run => {
                        // One that stays is small, and tried again the next time.
                        drop(self.in_time(store.delete(&probe)).await);
                    }
                    _ => {}
                }
            }
            each(rows).await;
        }
        Ok(())
    }

    /// What an object below a prefix of so many parts is; `None`: a stranger's, a manifest, a record
    /// of an epoch.
    fn what_is(&self, meta: ObjectMeta, depth: usize) -> Option<Thing> {
        let stored_at = meta.last_modified.timestamp();
        let mut parts = meta.location.parts().skip(depth);
        let first = parts.next()?.as_ref().to_owned();
        if first.starts_with(PROBE_PREFIX) {
            let is_left = stored_at < self.now.saturating_sub(seconds(PROBES_AFTER));
            return is_left.then_some(Thing::Probe(meta.location));
        }
        let is_row = is_directory_name(&first)
            && parts.next().is_some_and(|part| part.as_ref() == ROWS_NAME)
            && parts.count() == 3
            && parse_row(meta.location.as_ref()).is_some();
        is_row.then_some(Thing::Row(Found {
            namespace: first,
            path: meta.location,
            bytes: meta.size,
            stored_at,
        }))
    }

    async fn remove(&self, store: &Store, rows: Vec<Found>) {
        let deletions = futures_util::stream::iter(rows).map(|row| async move {
            let failure = if self.what.dry_run {
                None
            } else if self.failed_in_a_row.get() >= FAILURES_MAX {
                let text = "not tried: too many failed one after the other";
                Some(Failure::new(FailureKind::Other, text))
            } else {
                match self.in_time(store.delete(&row.path)).await {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(Failure::of(&error)),
                    Err(late) => Some(late),
                }
            };
            let failure = failure.filter(|failure| failure.kind != FailureKind::Missing);
            let failed = self.failed_in_a_row.get().saturating_add(1);
            self.failed_in_a_row
                .set(if failure.is_some() { failed } else { 0 });
            self.note(&row, failure);
        });
        deletions
            .buffer_unordered(DELETIONS)
            .for_each(core::future::ready)
            .await;
    }

    fn note(&self, row: &Found, failure: Option<Failure>) {
        let mut report = self.report.borrow_mut();
        let bytes = row.bytes;
        report.kept_rows = report.kept_rows.saturating_sub(1);
        report.kept_bytes = report.kept_bytes.saturating_sub(bytes);
        if let Some(failure) = failure {
            report.failed_rows = report.failed_rows.saturating_add(1);
            if failure.kind != FailureKind::Other || report.last_error.is_none() {
                report.last_error = Some(failure.to_string());
            }
            return;
        }
        report.removed_rows = report.removed_rows.saturating_add(1);
        report.removed_bytes = report.removed_bytes.saturating_add(bytes);
        if let Some(left) = self.left.borrow_mut().get_mut(&row.namespace) {
            *left = left.saturating_sub(1);
            if *left == 0 {
                report.emptied.push(row.namespace.clone());
            }
        }
    }
}

/// What concerns us below a prefix.
enum Thing {
    Row(Found),
    /// What a start has left behind.
    Probe(Path),
}

/// Removes rows below the prefix that `options` name; blocks until it is done, its time is over, or
/// `interrupted` says so, which is asked ten times a second.
///
/// # Errors
/// [`ErrorKind::Config`] for options that cannot work, and for a bucket that cannot be listed, with
/// what can be done about it.
pub fn run(
    options: &ObjectOptions,
    given: Option<&Store>,
    clock: &Arc<dyn Clock>,
    what: GcOptions,
    interrupted: &dyn Fn() -> bool,
) -> Result<GcReport> {
    options.validate()?;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            let text = "no thread for requests can be started";
            Error::new(ErrorKind::Unavailable, text).with_source(error)
        })?;
    let report = RefCell::new(GcReport::default());
    let run = Run {
        options,
        what,
        now: i64::from(clock.unix_seconds()),
        report: &report,
        left: RefCell::default(),
        failed_in_a_row: Cell::new(0),
    };
    let odd_names = Arc::default();
    let way = Way {
        options,
        given,
        clock,
        odd_names: &odd_names,
    };
    let until = what
        .time_limit
        .and_then(|time| clock.now().checked_add(time));
    let stopped = async {
        loop {
            if interrupted() {
                return GcEnd::Interrupted;
            }
            if until.is_some_and(|until| clock.now() >= until) {
                return GcEnd::TimeLimit;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let ended = runtime.block_on(async {
        match select(pin!(stopped), pin!(run.collect(way))).await {
            Either::Left((end, _)) => Ok(end),
            Either::Right((done, _)) => done,
        }
    });
    // A name that is being resolved is not waited for.
    runtime.shutdown_background();
    let mut report = report.into_inner();
    report.end = ended?;
    report.odd_names = odd_names.get();
    report.emptied.sort_unstable();
    Ok(report)
}
