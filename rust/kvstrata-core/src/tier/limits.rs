//! Limits under which a tier could never store a row: refused when it opens.

use std::collections::BTreeMap;

use crate::config::Size;
use crate::error::{Error, Result};
use crate::format::geometry::Geometry;
use crate::key::GroupId;

/// Refuses a capacity in which a group could not store a single row.
pub(super) fn check_capacity(
    row_bytes: &BTreeMap<GroupId, u64>,
    capacity_bytes: u64,
) -> Result<()> {
    for (group, least) in smallest_files(row_bytes)? {
        if capacity_bytes < least {
            return Err(Error::config(format!(
                "capacity: {capacity_bytes} bytes cannot hold one row of group {group}, whose \
                 smallest file takes {least} bytes"
            )));
        }
    }
    Ok(())
}

/// Refuses to leave so much free on a file system of `total_bytes` that a group could not store a
/// single row even if it were empty. Some file systems do not say how large they are (0).
pub(super) fn check_min_free(
    row_bytes: &BTreeMap<GroupId, u64>,
    min_free: Size,
    total_bytes: u64,
) -> Result<()> {
    if total_bytes == 0 {
        return Ok(());
    }
    let min_free_bytes = min_free.resolve(total_bytes);
    for (group, least) in smallest_files(row_bytes)? {
        if min_free_bytes.saturating_add(least) > total_bytes {
            return Err(Error::config(format!(
                "min_free: {min_free_bytes} bytes left free on a file system of {total_bytes} \
                 leave no room for one row of group {group}, whose smallest file takes {least} bytes"
            )));
        }
    }
    Ok(())
}

fn smallest_files(row_bytes: &BTreeMap<GroupId, u64>) -> Result<Vec<(GroupId, u64)>> {
    let smallest = |(group, row_bytes): (&GroupId, &u64)| {
        let least = Geometry::minimum_file_bytes(*row_bytes)
            .map_err(|error| Error::config(format!("row_bytes: group {group}: {error}")))?;
        Ok((*group, least))
    };
    row_bytes.iter().map(smallest).collect()
}
