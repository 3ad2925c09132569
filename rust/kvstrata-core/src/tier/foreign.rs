//! What else of ours lies in a root: row files of other namespaces, and small files.

use std::io;

use crate::namespace::layout;
use crate::sys::fs::{Directory, EntryKind};
use crate::sys::sync::Arc;
use crate::tier::root_lock::ROOT_LOCK_NAME;

/// A row file of a namespace that is not the open one.
#[derive(Debug)]
pub(crate) struct ForeignFile {
    /// The directory that holds it.
    pub(crate) directory: Arc<Directory>,
    /// Its name.
    pub(crate) name: String,
    /// Bytes it takes.
    pub(crate) allocated_bytes: u64,
    /// When it was last written, seconds since 1970.
    pub(crate) modified_unix_seconds: i64,
}

/// What a walk over the root found.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// Row files of other namespaces, the most recently written first.
    pub(crate) foreign: Vec<ForeignFile>,
    /// Bytes of everything of ours but row files: directories, manifests, epochs, locks.
    pub(crate) other_bytes: u64,
}

/// Walks the root: counts all that has our names, and nothing else.
///
/// # Errors
/// The error of reading the root itself; what cannot be read below it is left out.
pub(crate) fn survey(root: &Directory, own: &str) -> io::Result<Survey> {
    let mut survey = Survey {
        other_bytes: root.allocated_bytes()?,
        ..Survey::default()
    };
    for entry in root.entries()? {
        let Some(name) = entry.name.to_str() else {
            continue;
        };
        match entry.kind {
            EntryKind::File if name == ROOT_LOCK_NAME => {
                survey.other_bytes += small_file_bytes(root, name);
            }
            EntryKind::Directory if layout::is_directory_name(name) => {
                if let Ok(namespace) = root.directory(name) {
                    walk(&namespace, name == own, &mut survey);
                }
            }
            EntryKind::File | EntryKind::Directory | EntryKind::Other => {}
        }
    }
    // Taken from the end: the file that was written longest ago goes first.
    survey
        .foreign
        .sort_by_key(|file| core::cmp::Reverse(file.modified_unix_seconds));
    Ok(survey)
}

/// Bytes of a file of ours in `directory`; 0 for others, and for what cannot be looked at.
fn small_file_bytes(directory: &Directory, name: &str) -> u64 {
    directory.stat(name).map_or(0, |stat| stat.allocated_bytes)
}

/// Adds one namespace: its row files if it is not our own, all else as small bytes.
fn walk(directory: &Directory, own: bool, survey: &mut Survey) {
    survey.other_bytes += directory.allocated_bytes().unwrap_or(0);
    for entry in directory.entries().unwrap_or_default() {
        let Some(name) = entry.name.to_str() else {
            continue;
        };
        let below = || directory.directory(name).ok();
        match (entry.kind, name) {
            (EntryKind::File, layout::MANIFEST_NAME) => {
                survey.other_bytes += small_file_bytes(directory, name);
            }
            (EntryKind::Directory, layout::ROWS_NAME) => {
                if let Some(rows) = below() {
                    walk_groups(&rows, own, survey);
                }
            }
            (EntryKind::Directory, layout::WRITERS_NAME) => {
                if let Some(writers) = below() {
                    walk_writers(&writers, survey);
                }
            }
            (EntryKind::Directory, layout::EPOCHS_NAME) => {
                // Records of epochs are empty files.
                let bytes = below().and_then(|epochs| epochs.allocated_bytes().ok());
                survey.other_bytes += bytes.unwrap_or(0);
            }
            _ => {}
        }
    }
}

/// Adds the leases of a namespace's writers.
fn walk_writers(writers: &Directory, survey: &mut Survey) {
    survey.other_bytes += writers.allocated_bytes().unwrap_or(0);
    for entry in writers.entries().unwrap_or_default() {
        let writer = entry
            .name
            .to_str()
            .filter(|name| layout::parse_writer_name(name).is_some())
            .and_then(|name| writers.directory(name).ok());
        if let Some(writer) = writer {
            survey.other_bytes += writer.allocated_bytes().unwrap_or(0)
                + small_file_bytes(&writer, layout::LOCK_NAME);
        }
    }
}

fn walk_groups(rows: &Directory, own: bool, survey: &mut Survey) {
    survey.other_bytes += rows.allocated_bytes().unwrap_or(0);
    for entry in rows.entries().unwrap_or_default() {
        let Some(group) = entry
            .name
            .to_str()
            .filter(|name| layout::parse_group_name(name).is_some())
            .and_then(|name| rows.directory(name).ok())
        else {
            continue;
        };
        survey.other_bytes += group.allocated_bytes().unwrap_or(0);
        if own {
            continue;
        }
        let group = Arc::new(group);
        for entry in group.entries().unwrap_or_default() {
            let Some(name) = entry.name.to_str().filter(|name| {
                layout::parse_row_file_name(name).is_some() || layout::is_temporary_name(name)
            }) else {
                continue;
            };
            // A FIFO or link of that name is a stranger's.
            if let Ok(stat) = group.stat(name)
                && stat.is_regular
            {
                survey.foreign.push(ForeignFile {
                    directory: Arc::clone(&group),
                    name: name.to_owned(),
                    allocated_bytes: stat.allocated_bytes,
                    modified_unix_seconds: stat.modified_unix_seconds,
                });
            }
        }
    }
}
