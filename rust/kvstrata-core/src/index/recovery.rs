//! What a directory of row files holds: read from superblocks and row tables, never from rows.

use std::io;

use crate::format::change_page::{CHANGE_PAGE_BYTES, ChangePage};
use crate::format::geometry::Geometry;
use crate::format::row_table::{ENTRY_BYTES, RowEntry};
use crate::format::superblock::{
    FileId, NamespaceDigest, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR_BYTES, Superblock,
};
use crate::key::GroupId;
use crate::namespace::layout;
use crate::sys::fs::{Access, Direct, Directory, EntryKind, File};

/// Superblock and change page, read at once.
const HEAD_BYTES: usize = SUPERBLOCK_BYTES + CHANGE_PAGE_BYTES;
/// Bytes of the row table read at a time: what stays in a processor's cache until it is looked at.
const TABLE_CHUNK_BYTES: usize = 256 << 10;

/// Names in a group's directory.
#[derive(Debug, Default)]
pub struct Names {
    /// Those of row files.
    pub files: Vec<(String, FileId)>,
    /// Those of row files that were being made: to be removed.
    pub unfinished: Vec<String>,
    /// Other things in the directory: left alone.
    pub strange: u64,
}

/// Lists a group's directory.
///
/// # Errors
/// The kernel's.
pub fn list(directory: &Directory) -> io::Result<Names> {
    let mut names = Names::default();
    for entry in directory.entries()? {
        let name = entry
            .name
            .to_str()
            .filter(|_| entry.kind == EntryKind::File);
        match (name, name.and_then(layout::parse_row_file_name)) {
            (Some(name), Some(file_id)) => names.files.push((name.to_owned(), file_id)),
            (Some(name), None) if layout::is_temporary_name(name) => {
                names.unfinished.push(name.to_owned());
            }
            _ => names.strange += 1,
        }
    }
    Ok(names)
}

/// Whose rows a file must hold to be of use.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The namespace.
    pub namespace: NamespaceDigest,
    /// The group.
    pub group: GroupId,
    /// Payload bytes of a row of the group.
    pub row_bytes: u64,
}

/// A row file found at open.
#[derive(Debug)]
pub struct FoundFile {
    file: File,
    /// Its superblock.
    pub superblock: Superblock,
    /// Its change counters.
    pub changes: ChangePage,
    /// Bytes it takes on the file system.
    pub allocated_bytes: u64,
    /// First row that the file no longer holds, when it was cut.
    pub cut_at: Option<u32>,
}

/// What the table says of a row that is not free.
#[derive(Debug)]
pub enum Tabled {
    /// It holds the payload of a key, in some epoch.
    Row(RowEntry),
    /// Its entry is neither valid nor free: to be cleared before the row is used.
    Damaged,
}

impl FoundFile {
    /// Opens a row file; `None` when it is not one of this owner.
    ///
    /// # Errors
    /// The kernel's: the file may be fine.
    pub fn open(
        directory: &Directory,
        name: &str,
        file_id: FileId,
        owner: &Owner,
    ) -> io::Result<Option<Self>> {
        let file = directory.open(name, Access::Read, Direct::No)?;
        let stat = file.stat()?;
        let mut head = [0; HEAD_BYTES];
        if !read_all(&file, &mut head, 0)? {
            return Ok(None);
        }
        let Some((superblock, rest)) = head.split_first_chunk::<SUPERBLOCK_SECTOR_BYTES>() else {
            return Ok(None);
        };
        let Ok(superblock) = Superblock::decode(superblock) else {
            return Ok(None);
        };
        let geometry = superblock.geometry;
        let ours = superblock.namespace == owner.namespace
            && superblock.file_id == file_id
            && geometry.group() == owner.group
            && geometry.row_bytes() == owner.row_bytes;
        let Some(page) = rest.last_chunk::<CHANGE_PAGE_BYTES>().filter(|_| ours) else {
            return Ok(None);
        };
        Ok(Some(Self {
            changes: ChangePage::decode(page),
            allocated_bytes: stat.allocated_bytes,
            cut_at: cut_at(&geometry, stat.size_bytes),
            superblock,
            file,
        }))
    }

    /// Reads the row table in pieces of bounded size and tells of each row that is not free, in row
    /// order. Returns the first row that was not read, with the kernel's error, or without one
    /// where the table was cut.
    pub fn read_table(
        &self,
        buffer: &mut Vec<u8>,
        mut tell: impl FnMut(u32, Tabled),
    ) -> Option<(u32, Option<io::Error>)> {
        let (geometry, file_id) = (&self.superblock.geometry, self.superblock.file_id);
        buffer.resize(TABLE_CHUNK_BYTES, 0);
        let rows_per_chunk = u32::try_from(TABLE_CHUNK_BYTES / ENTRY_BYTES).unwrap_or(1);
        let mut first = 0;
        while first < geometry.row_count() {
            let rows = rows_per_chunk.min(geometry.row_count().saturating_sub(first));
            let bytes = usize::try_from(rows)
                .unwrap_or(0)
                .saturating_mul(ENTRY_BYTES);
            let chunk = buffer.get_mut(..bytes).unwrap_or(&mut []);
            match read_all(&self.file, chunk, geometry.entry_offset(first)) {
                Ok(true) => {}
                Ok(false) => return Some((first, None)),
                Err(error) => return Some((first, Some(error))),
            }
            for (row, bytes) in (first..).zip(chunk.as_chunks::<ENTRY_BYTES>().0) {
                match RowEntry::decode(bytes, file_id, row) {
                    Ok(Some(entry)) if entry.check(geometry).is_ok() => {
                        tell(row, Tabled::Row(entry));
                    }
                    Ok(None) => {}
                    Ok(Some(_)) | Err(_) => tell(row, Tabled::Damaged),
                }
            }
            first = first.saturating_add(rows);
        }
        None
    }
}

/// First row that a file of `size_bytes` does not hold whole.
fn cut_at(geometry: &Geometry, size_bytes: u64) -> Option<u32> {
    if size_bytes >= geometry.file_bytes() {
        return None;
    }
    let whole = size_bytes.saturating_sub(geometry.rows_offset()) / geometry.row_stride_bytes();
    Some(u32::try_from(whole).unwrap_or(u32::MAX))
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
