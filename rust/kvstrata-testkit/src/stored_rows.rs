//! A root as if a tier had stored many rows: whole superblocks and row tables, rows that were
//! never written (holes). Opening reads no rows, so a table is all that it takes to measure it.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::format::{
    ChangePage, ChecksumKind, ENTRY_BYTES, FileId, Generation, Geometry, NamespaceDigest,
    RowChecksum, RowEntry, Superblock, WriterId,
};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::namespace::{Epochs, Manifest, Namespace, layout};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};
use serde_json::{Map, Value};

use crate::payload::next;

/// Payload bytes of a row: with padding, one page.
pub const ROW_BYTES: u64 = 4000;

const GROUP: GroupId = GroupId(0);
/// Rows of this many different seconds.
const SECONDS: u64 = 86_400;

/// Options of the tier whose root [`make`] makes.
#[must_use]
pub fn options(root: &Path) -> TierOptions {
    TierOptions {
        root: root.to_path_buf(),
        identity: Map::from_iter([("model".to_owned(), Value::from("stored rows"))]),
        row_bytes: BTreeMap::from([(GROUP, ROW_BYTES)]),
        capacity: Size::Bytes(1 << 40),
        min_free: Size::Bytes(0),
        policy: "lru".to_owned(),
        directory: None,
        admission: kvstrata_core::eviction::admission::AdmissionOptions::default(),
        io_backend: "threads".to_owned(),
        deadline: Duration::from_secs(30),
        share_mode: "private".to_owned(),
        required: true,
        honours_busy: false,
    }
}

/// The key of row `number`: a 32-byte hash and the group.
///
/// # Errors
/// Never; a key's length is right.
pub fn key(number: u64) -> kvstrata_core::error::Result<Key> {
    let mut state = number.wrapping_mul(0xD1B5_4A32_D192_ED03);
    let mut bytes = [0; 36];
    for part in bytes.as_chunks_mut::<8>().0 {
        *part = next(&mut state).to_le_bytes();
    }
    Key::new(&bytes)
}

/// Makes a root with `rows` stored rows, keys 0 to `rows` - 1, in files as large as they can be.
/// Access times are in no order.
///
/// # Errors
/// The kernel's, and what the format refuses.
pub fn make(root: &Path, rows: u64) -> io::Result<()> {
    let broken = |error: kvstrata_core::error::Error| io::Error::other(error.to_string());
    let options = options(root);
    let root = Directory::open_root(root, true, ShareMode::Private).map_err(broken)?;
    let manifest = Manifest::new(options.identity, &options.row_bytes).map_err(broken)?;
    let namespace = Namespace::open(&root, &manifest).map_err(broken)?;
    let epoch = Epochs::open(namespace.directory())?.current();
    let directory = namespace.group_directory(GROUP)?;
    let mut first = 0;
    while first < rows {
        let full = Geometry::for_budget(GROUP, ROW_BYTES, u64::MAX).map_err(io::Error::other)?;
        let left = u32::try_from(rows - first).unwrap_or(u32::MAX);
        let geometry = Geometry::new(GROUP, ROW_BYTES, full.row_count().min(left))
            .map_err(io::Error::other)?;
        write_file(&directory, namespace.digest(), geometry, epoch, first)?;
        first += u64::from(geometry.row_count());
    }
    Ok(())
}

fn write_file(
    directory: &Directory,
    namespace: NamespaceDigest,
    geometry: Geometry,
    epoch: u32,
    first: u64,
) -> io::Result<()> {
    let file_id = FileId(first + 1);
    let superblock = Superblock {
        namespace,
        file_id,
        geometry,
        writer: WriterId([7; 16]),
        incarnation: 1,
        clean_store_order: 0,
        checksum_kind: ChecksumKind::Crc64Nvme,
    };
    let file = directory.create_new(&layout::row_file_name(file_id), Access::Write, Direct::No)?;
    file.set_length(geometry.file_bytes())?;
    file.write_all_at(&superblock.encode(), 0)?;
    file.write_all_at(&ChangePage::default().encode(), 4096)?;
    let mut table = Vec::new();
    for row in 0..geometry.row_count() {
        let number = first + u64::from(row);
        let mut state = number;
        let random = next(&mut state);
        let entry = RowEntry {
            key: key(number).map_err(io::Error::other)?,
            generation: Generation {
                incarnation: 1,
                counter: number + 1,
            },
            epoch,
            payload_bytes: u32::try_from(ROW_BYTES).unwrap_or(0),
            store_order: number + 1,
            access_time: 1_700_000_000 + u32::try_from(random % SECONDS).unwrap_or(0),
            checksum: RowChecksum(random).to_field(),
        };
        table.extend(entry.encode(file_id, row));
    }
    debug_assert_eq!(table.len() % ENTRY_BYTES, 0);
    file.write_all_at(&table, geometry.table_offset())
}
