//! What a directory of row files holds: read from superblocks and row tables, never from rows.

use std::io;

use crate::format::change_page::{CHANGE_PAGE_BYTES, ChangePage};
use crate::format::geometry::{CHANGE_PAGE_OFFSET, Geometry};
use crate::format::row_table::{ENTRY_BYTES, RowEntry};
use crate::format::superblock::{
    FileId, NamespaceDigest, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR_BYTES, Superblock,
};
use crate::key::GroupId;
use crate::namespace::layout;
use crate::sys::fs::{Access, Direct, Directory, EntryKind, File};

/// Bytes of the row table read at a time.
const TABLE_CHUNK_BYTES: usize = 1 << 20;

/// A row file found at open.
#[derive(Debug)]
pub struct FoundFile {
    /// Its name.
    pub name: String,
    /// Its superblock.
    pub superblock: Superblock,
    /// Its change counters.
    pub changes: ChangePage,
    /// Bytes it takes on the file system.
    pub allocated_bytes: u64,
    /// Its valid entries, of any epoch, in row order.
    pub entries: Vec<(u32, RowEntry)>,
    /// Rows whose entries are neither valid nor zero: cleared before the row is used.
    pub damaged: Vec<u32>,
    /// First row that the file no longer holds, when it was cut.
    pub cut_at: Option<u32>,
}

/// What a group's directory holds.
#[derive(Debug, Default)]
pub struct Found {
    /// Its usable row files.
    pub files: Vec<FoundFile>,
    /// Files with our names that are no row files of this namespace and group: to be removed.
    pub unusable: Vec<String>,
    /// Other things in the directory: left alone.
    pub strange: u64,
}

/// Reads all row files of a group.
///
/// # Errors
/// The error of listing the directory; a file that cannot be read is unusable.
pub fn scan(
    directory: &Directory,
    namespace: &NamespaceDigest,
    group: GroupId,
    row_bytes: u64,
) -> io::Result<Found> {
    let mut found = Found::default();
    for entry in directory.entries()? {
        let name = entry
            .name
            .to_str()
            .filter(|_| entry.kind == EntryKind::File);
        let Some(name) = name else {
            found.strange += 1;
            continue;
        };
        let Some(file_id) = layout::parse_row_file_name(name) else {
            if layout::is_temporary_name(name) {
                found.unusable.push(name.to_owned());
            } else {
                found.strange += 1;
            }
            continue;
        };
        match read_file(directory, name, file_id, namespace, group, row_bytes) {
            Ok(Some(file)) => found.files.push(file),
            Ok(None) => found.unusable.push(name.to_owned()),
            // Not readable now is no reason to destroy it.
            Err(_) => found.strange += 1,
        }
    }
    Ok(found)
}

/// Reads one row file; `None` when it is not a row file of this namespace and group.
fn read_file(
    directory: &Directory,
    name: &str,
    file_id: FileId,
    namespace: &NamespaceDigest,
    group: GroupId,
    row_bytes: u64,
) -> io::Result<Option<FoundFile>> {
    let file = directory.open(name, Access::Read, Direct::No)?;
    let stat = file.stat()?;
    let mut sector = [0; SUPERBLOCK_SECTOR_BYTES];
    if !read_all(&file, &mut sector, 0)? {
        return Ok(None);
    }
    let Ok(superblock) = Superblock::decode(&sector) else {
        return Ok(None);
    };
    let geometry = superblock.geometry;
    let ours = superblock.namespace == *namespace
        && superblock.file_id == file_id
        && geometry.group() == group
        && geometry.row_bytes() == row_bytes;
    if !ours {
        return Ok(None);
    }
    let mut page = [0; CHANGE_PAGE_BYTES];
    if !read_all(&file, &mut page, CHANGE_PAGE_OFFSET)? {
        return Ok(None);
    }
    let (entries, damaged) = read_table(&file, file_id, &geometry)?;
    Ok(Some(FoundFile {
        name: name.to_owned(),
        superblock,
        changes: ChangePage::decode(&page),
        allocated_bytes: stat.allocated_bytes,
        entries,
        damaged,
        cut_at: cut_at(&geometry, stat.size_bytes),
    }))
}

/// First row that a file of `size_bytes` does not hold whole.
fn cut_at(geometry: &Geometry, size_bytes: u64) -> Option<u32> {
    if size_bytes >= geometry.file_bytes() {
        return None;
    }
    let whole = size_bytes.saturating_sub(geometry.rows_offset()) / geometry.row_stride_bytes();
    Some(u32::try_from(whole).unwrap_or(u32::MAX))
}

type Table = (Vec<(u32, RowEntry)>, Vec<u32>);

/// Reads the row table in pieces of bounded size; a table that was cut ends early.
fn read_table(file: &File, file_id: FileId, geometry: &Geometry) -> io::Result<Table> {
    let (mut entries, mut damaged) = (Vec::new(), Vec::new());
    let mut buffer = vec![0; TABLE_CHUNK_BYTES];
    let rows_per_chunk = u32::try_from(TABLE_CHUNK_BYTES / ENTRY_BYTES).unwrap_or(1);
    let mut first = 0;
    while first < geometry.row_count() {
        let rows = rows_per_chunk.min(geometry.row_count().saturating_sub(first));
        let bytes = usize::try_from(rows)
            .unwrap_or(0)
            .saturating_mul(ENTRY_BYTES);
        let chunk = buffer.get_mut(..bytes).unwrap_or(&mut []);
        if !read_all(file, chunk, geometry.entry_offset(first))? {
            break;
        }
        for (row, bytes) in (first..).zip(chunk.as_chunks::<ENTRY_BYTES>().0) {
            match RowEntry::decode(bytes, file_id, row) {
                Ok(Some(entry)) if entry.check(geometry).is_ok() => entries.push((row, entry)),
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => damaged.push(row),
            }
        }
        first = first.saturating_add(rows);
    }
    Ok((entries, damaged))
}

/// Fills `buffer`; false when the file ends before.
fn read_all(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
    match file.read_exact_at(buffer, offset) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

const _: () = assert!(SUPERBLOCK_SECTOR_BYTES <= SUPERBLOCK_BYTES);
const _: () = assert!(TABLE_CHUNK_BYTES.is_multiple_of(ENTRY_BYTES));
