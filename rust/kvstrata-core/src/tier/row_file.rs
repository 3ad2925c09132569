//! The header and table of one row file on disk: entries written, cleared and read.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use crate::format::change_page::{ChangePage, counter_offset};
use crate::format::geometry::Geometry;
use crate::format::row_table::{ENTRY_BYTES, FREE_ENTRY, RowEntry};
use crate::format::superblock::{FileId, Superblock, WriterId};
use crate::io::file::{DataFile, FileCache};
use crate::sys::fs::{Direct, File};
use crate::sys::sync::{Arc, Mutex, lock};

/// One row file: its descriptor, its superblock, its change counters.
///
/// Only the tier's writer thread changes anything; any thread may read entries.
#[derive(Debug)]
pub(crate) struct RowFile {
    /// The file, opened when used.
    pub(crate) file: Arc<DataFile>,
    /// Its geometry, as the superblock states it.
    pub(crate) geometry: Geometry,
    /// Its identity, part of every entry's checksum.
    pub(crate) file_id: FileId,
    cache: Arc<FileCache>,
    header: Mutex<Header>,
}

#[derive(Debug)]
struct Header {
    superblock: Superblock,
    /// Whether this process made the file or has raised its incarnation.
    raised: bool,
    changes: ChangePage,
}

impl RowFile {
    /// A file with this superblock and change page on disk; `raised` if this process made it,
    /// else its incarnation is raised before the first write.
    pub(crate) const fn new(
        file: Arc<DataFile>,
        cache: Arc<FileCache>,
        superblock: Superblock,
        raised: bool,
        changes: ChangePage,
    ) -> Self {
        let (geometry, file_id) = (superblock.geometry, superblock.file_id);
        let header = Mutex::new(Header {
            superblock,
            raised,
            changes,
        });
        Self {
            file,
            geometry,
            file_id,
            cache,
            header,
        }
    }

    /// Where the file is, for messages.
    pub(crate) fn path(&self) -> PathBuf {
        self.file.directory().path_of(self.file.name())
    }

    fn table(&self) -> io::Result<Arc<File>> {
        Ok(self.cache.get(&self.file, Direct::No)?.0)
    }

    /// The incarnation of the next row.
    pub(crate) fn incarnation(&self) -> u32 {
        lock(&self.header).superblock.incarnation
    }

    /// Whether this process has written the file's header, and so may write its table and rows.
    pub(crate) fn is_raised(&self) -> bool {
        lock(&self.header).raised
    }

    /// Raises the incarnation on disk, once, before this process's first write.
    ///
    /// # Errors
    /// The device's error; the file must then not be written.
    pub(crate) fn raise_incarnation(&self, writer: WriterId) -> io::Result<()> {
        let mut header = lock(&self.header);
        if header.raised {
            return Ok(());
        }
        let next = header
            .superblock
            .taken_over_by(writer)
            .ok_or_else(|| io::Error::other("the incarnations of a row file are used up"))?;
        self.write_superblock(&next)?;
        header.superblock = next;
        header.raised = true;
        // Descriptors opened while the file could only be read are no use from here on.
        self.file.close();
        Ok(())
    }

    /// States that all rows up to `store_order` have reached the device, after making it so.
    ///
    /// # Errors
    /// The device's error; the mark is then not moved.
    pub(crate) fn mark_clean(&self, store_order: u64) -> io::Result<()> {
        let mut header = lock(&self.header);
        if !header.raised {
            return Ok(());
        }
        self.table()?.sync_data()?;
        let next = Superblock {
            clean_store_order: store_order,
            ..header.superblock
        };
        self.write_superblock(&next)?;
        header.superblock = next;
        Ok(())
    }

    fn write_superblock(&self, superblock: &Superblock) -> io::Result<()> {
        let table = self.table()?;
        table.write_all_at(&superblock.encode(), 0)?;
        table.sync_data()
    }

    /// Writes the entries of rows whose bytes have been written.
    ///
    /// # Errors
    /// The device's error; any of the entries may then be on disk or not.
    pub(crate) fn write_entries(&self, entries: &[(u32, RowEntry)]) -> io::Result<()> {
        let encoded: Vec<(u32, [u8; ENTRY_BYTES])> = entries
            .iter()
            .map(|(row, entry)| (*row, entry.encode(self.file_id, *row)))
            .collect();
        self.write_table(&encoded)
    }

    /// Clears the entries of rows: from now on the rows hold nothing.
    ///
    /// # Errors
    /// The device's error; the rows must then not be overwritten.
    pub(crate) fn clear_entries(&self, rows: &[u32]) -> io::Result<()> {
        let encoded: Vec<(u32, [u8; ENTRY_BYTES])> =
            rows.iter().map(|row| (*row, FREE_ENTRY)).collect();
        self.write_table(&encoded)
    }

    /// Writes entries, those of neighbouring rows in one operation, then the change counters.
    fn write_table(&self, entries: &[(u32, [u8; ENTRY_BYTES])]) -> io::Result<()> {
        let mut sorted: Vec<&(u32, [u8; ENTRY_BYTES])> = entries.iter().collect();
        sorted.sort_unstable_by_key(|(row, _)| *row);
        let table = self.table()?;
        let neighbours = |a: &&(u32, [u8; ENTRY_BYTES]), b: &&(u32, [u8; ENTRY_BYTES])| {
            a.0.checked_add(1) == Some(b.0)
        };
        for run in sorted.chunk_by(neighbours) {
            let Some((first, _)) = run.first().copied() else {
                continue;
            };
            let bytes: Vec<u8> = run.iter().flat_map(|(_, entry)| *entry).collect();
            table.write_all_at(&bytes, self.geometry.entry_offset(*first))?;
        }
        let regions: BTreeSet<u32> = sorted
            .iter()
            .map(|(row, _)| self.geometry.region_of(*row))
            .collect();
        let (Some(first), Some(last)) = (regions.first().copied(), regions.last().copied()) else {
            return Ok(());
        };
        // One write for all of them: the counters between are written as they are.
        let mut header = lock(&self.header);
        for region in &regions {
            header.changes.raise(*region);
        }
        let counters: Vec<u8> = (first..=last)
            .flat_map(|region| header.changes.counter(region).to_le_bytes())
            .collect();
        drop(header);
        table.write_all_at(&counters, counter_offset(first))
    }

    /// Brings newer access times to the entries of rows.
    ///
    /// # Errors
    /// The device's error; some entries may then keep their older time.
    pub(crate) fn write_access_times(
        &self,
        rows: &[(crate::index::RowPlace, u32)],
        writer: WriterId,
    ) -> io::Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        self.raise_incarnation(writer)?;
        let mut entries = Vec::with_capacity(rows.len());
        for (place, access_time) in rows {
            if let Some(mut entry) = self.read_entry(place.row)? {
                entry.access_time = *access_time;
                entries.push((place.row, entry));
            }
        }
        self.write_entries(&entries)
    }

    /// Reads one entry from disk; `None` when it is cleared or not an entry of this row.
    ///
    /// # Errors
    /// The device's error, or an end of file before the entry's end.
    pub(crate) fn read_entry(&self, row: u32) -> io::Result<Option<RowEntry>> {
        let mut bytes = [0; ENTRY_BYTES];
        self.table()?
            .read_exact_at(&mut bytes, self.geometry.entry_offset(row))?;
        Ok(RowEntry::decode(&bytes, self.file_id, row).unwrap_or(None))
    }
}
