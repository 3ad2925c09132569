//! Takes what earlier runs left in a namespace into the inventory.

use std::io;

use crate::format::checksum::RowChecksum;
use crate::format::row_table::RowEntry;
use crate::format::superblock::NamespaceDigest;
use crate::index::recovery::{Found, FoundFile, scan};
use crate::index::{Fingerprinter, RowPlace};
use crate::io::file::{DataFile, FileCache};
use crate::key::GroupId;
use crate::namespace::epoch::Epochs;
use crate::notice::Level;
use crate::sys::fs::{Access, Directory};
use crate::sys::sync::Arc;
use crate::tier::container::Container;
use crate::tier::disk::{Surroundings, count};
use crate::tier::inventory::{Inventory, NewRow};
use crate::tier::row_file::RowFile;
use crate::tier::rows::{RowUse, Rows};

/// Where to look and what to use.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    /// The directory of each group's row files.
    pub(crate) directories: &'a [Arc<Directory>],
    /// The groups, in the same order, with the payload bytes of a row.
    pub(crate) groups: &'a [(GroupId, u64)],
    /// The namespace.
    pub(crate) digest: NamespaceDigest,
    /// For descriptors.
    pub(crate) cache: &'a Arc<FileCache>,
    /// For the index.
    pub(crate) fingerprinter: &'a Fingerprinter,
    /// For counters and log lines.
    pub(crate) around: &'a Surroundings,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovered {
    /// Bytes that the row files take.
    pub(crate) allocated_bytes: u64,
    /// Largest store order of any row.
    pub(crate) last_store_order: u64,
}

/// One row that may be listed.
struct Candidate {
    place: RowPlace,
    entry: RowEntry,
}

/// Reads all row tables and lists the rows of the current epoch, the coldest first.
///
/// # Errors
/// The error of a directory that cannot be listed, or of recording an epoch.
pub(crate) fn recover(
    source: &Source<'_>,
    epochs: &mut Epochs,
    inventory: &mut Inventory,
) -> io::Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut candidates = Vec::new();
    for (directory, (group, row_bytes)) in source.directories.iter().zip(source.groups) {
        let found = scan(directory, &source.digest, *group, *row_bytes)?;
        remove_unusable(source, directory, &found);
        for file in found.files {
            recovered.allocated_bytes += file.allocated_bytes;
            let clean = file.superblock.clean_store_order;
            recovered.last_store_order = recovered.last_store_order.max(clean);
            take_file(source, directory, *group, file, inventory, &mut candidates);
        }
    }
    let newest = candidates
        .iter()
        .map(|candidate| candidate.entry.epoch)
        .max()
        .unwrap_or(0);
    if newest > epochs.current() || (epochs.begun() && newest > 0) {
        // The record of a reset was lost: nothing stored under any epoch may come back.
        source.around.notices.say(Level::Warning, "epoch", || {
            "the record of the newest epoch is gone; all stored rows are given up".to_owned()
        });
        epochs.advance(newest.saturating_add(1))?;
    }
    let orders = candidates
        .iter()
        .map(|candidate| candidate.entry.store_order);
    recovered.last_store_order = recovered.last_store_order.max(orders.max().unwrap_or(0));
    list(source, epochs.current(), inventory, candidates);
    Ok(recovered)
}

/// Removes files that bear our names but hold nothing that could be used.
fn remove_unusable(source: &Source<'_>, directory: &Directory, found: &Found) {
    let metrics = &source.around.metrics;
    metrics.junk.add(found.strange);
    for name in &found.unusable {
        metrics.junk.add(1);
        let removed = directory.unlink(name);
        source.around.notices.say(Level::Warning, "junk", || {
            let path = directory.path_of(name);
            match removed {
                Ok(()) => format!("{} was unusable and is removed", path.display()),
                Err(error) => format!("{} is unusable: {error}", path.display()),
            }
        });
    }
}

/// Takes one file in; its entries become candidates.
fn take_file(
    source: &Source<'_>,
    directory: &Arc<Directory>,
    group: GroupId,
    file: FoundFile,
    inventory: &mut Inventory,
    candidates: &mut Vec<Candidate>,
) {
    let Some(class) = inventory.class_of(group) else {
        return;
    };
    let geometry = file.superblock.geometry;
    let mut rows = Rows::new(geometry.row_count());
    for row in file
        .entries
        .iter()
        .map(|(row, _)| *row)
        .chain(file.damaged.iter().copied())
    {
        rows.set_stale(row, true);
    }
    for row in file.cut_at.unwrap_or(u32::MAX)..geometry.row_count() {
        rows.set(row, RowUse::Retired);
    }
    source
        .around
        .metrics
        .junk
        .add(count(file.damaged.len()) + u64::from(file.cut_at.is_some()));
    let data_file = DataFile::new(Arc::clone(directory), file.name, Access::Write);
    let cache = Arc::clone(source.cache);
    let clean = file.superblock.clean_store_order;
    let container = inventory.add_container(Container {
        row_file: Arc::new(RowFile::new(
            data_file,
            cache,
            file.superblock,
            false,
            file.changes,
        )),
        class,
        rows,
        allocated_bytes: file.allocated_bytes,
        lost: false,
        torn_after: Some(clean),
    });
    let whole = file.cut_at.unwrap_or(u32::MAX);
    candidates.extend(
        file.entries
            .into_iter()
            .filter(|(row, _)| *row < whole)
            .map(|(row, entry)| Candidate {
                place: RowPlace { container, row },
                entry,
            }),
    );
}

/// Lists the rows of one epoch in the order of their last access; of two rows of a key the one
/// stored later counts.
fn list(
    source: &Source<'_>,
    epoch: u32,
    inventory: &mut Inventory,
    mut candidates: Vec<Candidate>,
) {
    candidates.retain(|candidate| candidate.entry.epoch == epoch);
    inventory.index.reserve(candidates.len());
    // Within one second the tail of a request, stored last, is the colder end.
    candidates.sort_unstable_by_key(|candidate| {
        (
            candidate.entry.access_time,
            core::cmp::Reverse(candidate.entry.store_order),
        )
    });
    for Candidate { place, entry } in candidates {
        let fingerprint = source.fingerprinter.of(&entry.key);
        let older = inventory
            .index
            .find(fingerprint)
            .and_then(|id| inventory.index.get(id));
        if older.is_some_and(|older| older.store_order > entry.store_order) {
            continue;
        }
        let Some(checksum) = RowChecksum::from_field(&entry.checksum) else {
            continue;
        };
        let listed = inventory.publish(NewRow {
            fingerprint,
            place,
            checksum,
            store_order: entry.store_order,
            access_time: entry.access_time,
        });
        if listed.is_some()
            && let Some(container) = inventory.container_mut(place.container)
        {
            container.rows.set_stale(place.row, false);
        }
    }
}
