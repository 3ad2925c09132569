//! Removing rows from a bucket: whole idle namespaces first, then the oldest rows.
//!
//! Safe beside running engines: a row that is gone is a miss, and stored again. Manifests and
//! records of epochs stay: without a record, rows that were reset could come back.

use core::time::Duration;
use std::collections::BTreeMap;

use futures_util::StreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::runtime::Builder;

use crate::error::{Error, ErrorKind, Result};
use crate::namespace::layout::{ROWS_NAME, is_directory_name};
use crate::object::connect::{Style, connect};
use crate::object::names::parse_row;
use crate::object::probe::PROBE_PREFIX;
use crate::object::{Addressing, Failure, FailureKind, Location, ObjectOptions, Store};
use crate::sys::clock::Clock;
use crate::sys::sync::Arc;

/// A namespace nothing was stored in for so long is idle.
pub const IDLE_AFTER: Duration = Duration::from_hours(24);
/// Deletions at a time.
const DELETIONS: usize = 16;
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
    /// Rows left.
    pub kept_rows: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// Namespaces of which all rows were removed.
    pub emptied: Vec<String>,
}

/// A row in a bucket.
#[derive(Clone, Debug)]
struct Found {
    path: Path,
    bytes: u64,
    /// Seconds since 1970.
    stored_at: i64,
}

/// Removes rows below a prefix.
///
/// # Errors
/// The failure of the request that lists the bucket.
async fn collect(
    store: &Store,
    location: &Location,
    options: GcOptions,
    now_unix_seconds: u32,
) -> core::result::Result<GcReport, Failure> {
    let now = i64::from(now_unix_seconds);
    let (mut namespaces, probes) = find(store, location, now).await?;
    let (mut goes, mut emptied) = (Vec::new(), Vec::new());
    if let Some(older_than) = options.older_than {
        let before = now.saturating_sub(seconds(older_than));
        for rows in namespaces.values_mut() {
            goes.extend(rows.extract_if(.., |row| row.stored_at < before));
        }
    }
    if let Some(capacity) = options.capacity_bytes {
        shrink(&mut namespaces, capacity, now, &mut goes);
    }
    let kept = namespaces.values().flatten();
    let mut report = GcReport {
        kept_rows: u64::try_from(kept.clone().count()).unwrap_or(u64::MAX),
        kept_bytes: kept.map(|row| row.bytes).sum(),
        ..GcReport::default()
    };
    for (name, rows) in &namespaces {
        if rows.is_empty() && goes.iter().any(|row| is_in(&row.path, name)) {
            emptied.push(name.clone());
        }
    }
    report.emptied = emptied;
    remove(store, goes, options.dry_run, &mut report).await;
    if !options.dry_run {
        for probe in probes {
            // One that stays is small, and tried again the next time.
            let _ = store.delete(&probe).await;
        }
    }
    Ok(report)
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn is_in(path: &Path, namespace: &str) -> bool {
    path.parts().any(|part| part.as_ref() == namespace)
}

/// All rows, by namespace, and probes that were left.
async fn find(
    store: &Store,
    location: &Location,
    now: i64,
) -> core::result::Result<(BTreeMap<String, Vec<Found>>, Vec<Path>), Failure> {
    let prefix = (!location.prefix.is_empty()).then(|| Path::from(location.prefix.as_str()));
    let depth = prefix.as_ref().map_or(0, Path::parts_count);
    let mut listed = store.list(prefix.as_ref());
    let mut namespaces: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    let mut probes = Vec::new();
    while let Some(meta) = listed.next().await {
        let meta = meta.map_err(|error| Failure::of(&error))?;
        let stored_at = meta.last_modified.timestamp();
        let mut parts = meta.location.parts().skip(depth);
        let Some(first) = parts.next() else { continue };
        let first = first.as_ref().to_owned();
        if first.starts_with(PROBE_PREFIX) {
            if stored_at < now.saturating_sub(seconds(PROBES_AFTER)) {
                probes.push(meta.location.clone());
            }
            continue;
        }
        let is_row = is_directory_name(&first)
            && parts.next().is_some_and(|part| part.as_ref() == ROWS_NAME)
            && parts.count() == 3
            && parse_row(meta.location.as_ref()).is_some();
        // Anything else is no row of ours: a stranger's, a manifest, a record of an epoch.
        if is_row {
            namespaces.entry(first).or_default().push(Found {
                path: meta.location.clone(),
                bytes: meta.size,
                stored_at,
            });
        }
    }
    Ok((namespaces, probes))
}

/// Takes out what has to go for the rest to fit: whole idle namespaces, the one unused longest
/// first, then the oldest rows of all.
fn shrink(
    namespaces: &mut BTreeMap<String, Vec<Found>>,
    capacity: u64,
    now: i64,
    goes: &mut Vec<Found>,
) {
    let mut bytes: u64 = namespaces.values().flatten().map(|row| row.bytes).sum();
    let idle_before = now.saturating_sub(seconds(IDLE_AFTER));
    let mut idle: Vec<(i64, String)> = namespaces
        .iter()
        .filter_map(|(name, rows)| {
            let newest = rows.iter().map(|row| row.stored_at).max()?;
            (newest < idle_before).then(|| (newest, name.clone()))
        })
        .collect();
    idle.sort_unstable();
    for (_, name) in idle {
        if bytes <= capacity {
            return;
        }
        let rows = namespaces.get_mut(&name).map(core::mem::take);
        for row in rows.into_iter().flatten() {
            bytes = bytes.saturating_sub(row.bytes);
            goes.push(row);
        }
    }
    let mut ages: Vec<(i64, u64)> = namespaces
        .values()
        .flatten()
        .map(|row| (row.stored_at, row.bytes))
        .collect();
    ages.sort_unstable();
    let mut oldest_kept = i64::MIN;
    let mut left = bytes;
    for (stored_at, size) in ages {
        if left <= capacity {
            break;
        }
        left = left.saturating_sub(size);
        oldest_kept = stored_at;
    }
    for rows in namespaces.values_mut() {
        rows.sort_unstable_by_key(|row| (row.stored_at, row.bytes));
        goes.extend(rows.extract_if(.., |row| {
            let out = bytes > capacity && row.stored_at <= oldest_kept;
            if out {
                bytes = bytes.saturating_sub(row.bytes);
            }
            out
        }));
    }
}

async fn remove(store: &Store, goes: Vec<Found>, dry_run: bool, report: &mut GcReport) {
    let deletions = futures_util::stream::iter(goes).map(|row| async move {
        if dry_run {
            return (row.bytes, true);
        }
        let gone = match store.delete(&row.path).await {
            Ok(()) => true,
            Err(error) => Failure::of(&error).kind == FailureKind::Missing,
        };
        (row.bytes, gone)
    });
    let mut ended = deletions.buffer_unordered(DELETIONS);
    while let Some((bytes, gone)) = ended.next().await {
        if gone {
            report.removed_rows = report.removed_rows.saturating_add(1);
            report.removed_bytes = report.removed_bytes.saturating_add(bytes);
        } else {
            report.failed_rows = report.failed_rows.saturating_add(1);
        }
    }
}

/// Removes rows below the prefix that `options` name; blocks until it is done.
///
/// # Errors
/// [`ErrorKind::Config`] for options that cannot work, and for a bucket that cannot be listed, with
/// what can be done about it.
pub fn run(
    options: &ObjectOptions,
    given: Option<Store>,
    clock: &Arc<dyn Clock>,
    what: GcOptions,
) -> Result<GcReport> {
    options.validate()?;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            let text = "no thread for requests can be started";
            Error::new(ErrorKind::Unavailable, text).with_source(error)
        })?;
    let virtual_style = match options.addressing {
        Addressing::Path => false,
        Addressing::Virtual => true,
        Addressing::Auto => options.endpoint.is_none(),
    };
    let style = if virtual_style {
        Style::Virtual
    } else {
        Style::Path
    };
    let store = match given {
        Some(given) => given,
        None => connect(options, style, clock)?,
    };
    let now = clock.unix_seconds();
    let collected = runtime.block_on(collect(&store, &options.location, what, now));
    collected.map_err(|failure| options.unusable("list", &failure))
}
