//! Makes the golden namespace of the current format version. Everything in it is fixed, so that
//! two runs of the same code give the same bytes.

use std::collections::BTreeMap;
use std::path::Path;

use kvstrata_core::format::checksum::row_checksum;
use kvstrata_core::format::{
    ChangePage, ChecksumKind, FileId, Generation, Geometry, NamespaceDigest, RowEntry, Superblock,
    WriterId,
};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::namespace::{Epochs, Manifest, Namespace, layout};
use kvstrata_core::sys::fs::{Access, Direct, Directory, File, ShareMode};
use serde_json::json;

/// Payload bytes of a row of the golden row file.
pub(crate) const ROW_BYTES: u64 = 5000;
/// The group of the golden row file.
pub(crate) const GROUP: GroupId = GroupId(1);
/// The golden row file's number.
pub(crate) const FILE_ID: FileId = FileId(0x0123_4567_89ab_cdef);
/// The epoch of its rows.
pub(crate) const EPOCH: u32 = 2;

/// The golden manifest: every kind of JSON value, names that need sorting, text that needs escapes.
pub(crate) fn manifest() -> Manifest {
    let identity = json!({
        "model": "example/Golden \u{2728}-1",
        "revision": "0f\n\"quoted\"\\",
        "rope_theta": 500_000.0,
        "scale": 1e-7,
        "window": null,
        "tied": false,
        "layers": [0, -1, 18_446_744_073_709_551_615_u64],
        "groups": {"b": {"dtype": "bfloat16"}, "a": {}, "B": []},
    });
    let serde_json::Value::Object(identity) = identity else {
        panic!("an object was written")
    };
    Manifest::new(
        identity,
        &BTreeMap::from([(GroupId(0), 1), (GROUP, ROW_BYTES)]),
    )
    .unwrap()
}

/// The key of row `row`: a 32-byte hash in even rows, a 64-byte hash in odd ones.
pub(crate) fn key(row: u32) -> Key {
    let length = if row.is_multiple_of(2) { 32 } else { 64 };
    let mut bytes: Vec<u8> = noise(1000 + row).take(length).collect();
    bytes.extend(GROUP.0.to_be_bytes());
    Key::new(&bytes).unwrap()
}

/// The payload of row `row`.
pub(crate) fn payload(row: u32) -> Vec<u8> {
    noise(row)
        .take(usize::try_from(ROW_BYTES).unwrap())
        .collect()
}

/// Bytes that look random, the same for the same seed.
fn noise(seed: u32) -> impl Iterator<Item = u8> {
    let mut state = u64::from(seed).wrapping_mul(2).wrapping_add(1);
    core::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_be_bytes()[0]
    })
}

/// The entry of row `row`.
pub(crate) fn entry(namespace: &NamespaceDigest, row: u32) -> RowEntry {
    let key = key(row);
    RowEntry {
        key,
        generation: Generation {
            incarnation: 2,
            counter: 40 + u64::from(row),
        },
        epoch: EPOCH,
        payload_bytes: u32::try_from(ROW_BYTES).unwrap(),
        store_order: 100 + u64::from(row),
        access_time: 1_700_000_000 + row,
        checksum: row_checksum(namespace, &key, &payload(row)).to_field(),
    }
}

/// The golden superblock.
pub(crate) fn superblock(namespace: NamespaceDigest) -> Superblock {
    Superblock {
        namespace,
        file_id: FILE_ID,
        geometry: Geometry::new(GROUP, ROW_BYTES, 4).unwrap(),
        writer: WriterId([0xa5; 16]),
        incarnation: 2,
        clean_store_order: 100,
        checksum_kind: ChecksumKind::Crc64Nvme,
    }
}

/// Writes the golden namespace below `root`: row 0 valid, row 1 never written, row 2 cleared with
/// its old bytes still there, row 3 valid.
pub(crate) fn generate(root: &Path) {
    let root = Directory::open_root(root, true, ShareMode::Private).unwrap();
    let namespace = Namespace::open(&root, &manifest()).unwrap();
    let mut epochs = Epochs::open(namespace.directory()).unwrap();
    assert_eq!(epochs.advance(EPOCH).unwrap(), EPOCH);
    let rows = namespace.group_directory(GROUP).unwrap();
    let file = rows
        .create_new(&layout::row_file_name(FILE_ID), Access::Write, Direct::No)
        .unwrap();
    write_rows(&file, namespace.digest());
}

fn write_rows(file: &File, namespace: NamespaceDigest) {
    let superblock = superblock(namespace);
    let geometry = superblock.geometry;
    let mut changes = ChangePage::default();
    file.set_length(geometry.file_bytes()).unwrap();
    file.write_all_at(&superblock.encode(), 0).unwrap();
    for row in [0, 2, 3] {
        file.write_all_at(&payload(row), geometry.row_offset(row))
            .unwrap();
        if row != 2 {
            let entry = entry(&namespace, row).encode(FILE_ID, row);
            file.write_all_at(&entry, geometry.entry_offset(row))
                .unwrap();
        }
        let (counter, offset) = changes.raise(geometry.region_of(row)).unwrap();
        file.write_all_at(&counter.to_le_bytes(), offset).unwrap();
    }
}
