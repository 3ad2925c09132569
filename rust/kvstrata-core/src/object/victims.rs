//! Which rows of a bucket go. Pure.

use core::time::Duration;
use std::collections::BTreeMap;

use object_store::path::Path;

/// A namespace nothing was stored in for so long is idle.
const IDLE_AFTER: Duration = Duration::from_hours(24);

/// A row in a bucket.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) path: Path,
    pub(super) bytes: u64,
    /// Seconds since 1970.
    pub(super) stored_at: i64,
}

/// Rows by the directory of their namespace.
pub(super) type Namespaces = BTreeMap<String, Vec<Found>>;

pub(super) fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

/// Takes out what has to go for the rest to fit: whole idle namespaces, the one unused longest
/// first, then the oldest rows of all.
pub(super) fn shrink(
    namespaces: &mut Namespaces,
    capacity: u64,
    now: i64,
    goes: &mut Vec<(String, Found)>,
) {
    let sizes = namespaces.values().flatten().map(|row| row.bytes);
    let mut bytes = sizes.fold(0, u64::saturating_add);
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
            goes.push((name.clone(), row));
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
    for (name, rows) in namespaces {
        rows.sort_unstable_by_key(|row| (row.stored_at, row.bytes));
        let old = rows.extract_if(.., |row| {
            let out = bytes > capacity && row.stored_at <= oldest_kept;
            if out {
                bytes = bytes.saturating_sub(row.bytes);
            }
            out
        });
        goes.extend(old.map(|row| (name.clone(), row)));
    }
}
