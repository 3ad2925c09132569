//! The released format, byte for byte: today's code reads the committed files and writes the same.

#![expect(
    clippy::disallowed_methods,
    reason = "the files are compared from the outside"
)]
#![expect(clippy::indexing_slicing, reason = "a helper of a test fails the test")]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kvstrata_core::format::checksum::row_checksum;
use kvstrata_core::format::{ChangePage, ENTRY_BYTES, RowEntry, Superblock};
use kvstrata_core::namespace::{Epochs, Namespace, layout};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};

#[path = "../golden/datagen.rs"]
mod datagen;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v1")
}

/// Every file below `root` with its bytes, by relative path.
fn tree(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().to_owned();
                files.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// A private copy of the committed files, as a checkout has the modes of its umask.
fn copy(target: &Path) {
    std::fs::set_permissions(target, PermissionsExt::from_mode(0o700)).unwrap();
    for (name, bytes) in tree(&golden()) {
        let path = target.join(name);
        let parent = path.parent().unwrap();
        std::fs::create_dir_all(parent).unwrap();
        for directory in parent
            .ancestors()
            .take_while(|directory| *directory != target)
        {
            std::fs::set_permissions(directory, PermissionsExt::from_mode(0o700)).unwrap();
        }
        std::fs::write(path, bytes).unwrap();
    }
}

#[test]
fn todays_code_writes_the_golden_files_byte_for_byte() {
    let fresh = tempfile::tempdir().unwrap();
    datagen::generate(fresh.path());
    let (ours, committed) = (tree(fresh.path()), tree(&golden()));
    assert_eq!(
        committed.keys().collect::<Vec<_>>(),
        ours.keys().collect::<Vec<_>>()
    );
    assert_eq!(committed.len(), 3);
    for (name, bytes) in &committed {
        assert!(ours[name] == *bytes, "{} differs", name.display());
    }
}

#[test]
fn todays_code_reads_the_golden_files() {
    let place = tempfile::tempdir().unwrap();
    copy(place.path());
    let root = Directory::open_root(place.path(), false, ShareMode::Private).unwrap();
    let namespace = Namespace::open(&root, &datagen::manifest()).unwrap();
    assert_eq!(
        Epochs::open(namespace.directory()).unwrap().current(),
        datagen::EPOCH
    );
    let rows = namespace.group_directory(datagen::GROUP).unwrap();
    let name = layout::row_file_name(datagen::FILE_ID);
    let file = rows.open(&name, Access::Read, Direct::No).unwrap();

    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 0).unwrap();
    let superblock = Superblock::decode(&page).unwrap();
    assert_eq!(superblock, datagen::superblock(namespace.digest()));
    let geometry = superblock.geometry;
    assert_eq!(file.stat().unwrap().size_bytes, geometry.file_bytes());
    file.read_exact_at(&mut page, 4096).unwrap();
    assert_eq!(ChangePage::decode(&page).counter(0), 3);

    for row in 0..geometry.row_count() {
        let mut bytes = [0; ENTRY_BYTES];
        file.read_exact_at(&mut bytes, geometry.entry_offset(row))
            .unwrap();
        let entry = RowEntry::decode(&bytes, superblock.file_id, row).unwrap();
        if row == 1 || row == 2 {
            assert_eq!(entry, None);
            continue;
        }
        let entry = entry.unwrap();
        assert_eq!(entry, datagen::entry(&namespace.digest(), row));
        entry.check(&geometry).unwrap();
        let mut payload = vec![0; usize::try_from(entry.payload_bytes).unwrap()];
        file.read_exact_at(&mut payload, geometry.row_offset(row))
            .unwrap();
        assert_eq!(payload, datagen::payload(row));
        let checksum = row_checksum(&namespace.digest(), &entry.key, &payload);
        assert_eq!(checksum.to_field(), entry.checksum);
    }
}

/// Reads the file with nothing but the numbers of `docs/FORMAT.md`.
#[test]
fn the_golden_superblock_has_its_fields_where_the_document_says() {
    let file = golden_row_file();
    let number = |at, bytes| number_at(&file, at, bytes);
    let digest = blake3::hash(datagen::manifest().canonical().as_bytes());
    assert_eq!(file.len(), 8192 + 4096 + 4 * 8192);
    assert_eq!(&file[..8], b"KVSTRATA");
    assert_eq!(
        (number(8, 4), number(12, 4)),
        (1, 1),
        "version, checksum kind"
    );
    assert_eq!(&file[16..48], digest.as_bytes());
    assert_eq!(number(48, 8), 0x0123_4567_89ab_cdef, "file id");
    assert_eq!(
        (number(56, 8), number(64, 8)),
        (5000, 8192),
        "row bytes, stride"
    );
    assert_eq!((number(72, 4), number(76, 4)), (4, 1), "row count, group");
    assert_eq!(file[80..96], [0xa5; 16], "writer");
    assert_eq!(
        (number(96, 4), number(100, 4)),
        (2, 0),
        "incarnation, reserved"
    );
    assert_eq!(number(104, 8), 100, "clean mark");
    assert!(
        file[112..508]
            .iter()
            .chain(&file[512..4096 + 64])
            .all(|byte| *byte == 0)
    );
    assert_eq!(
        (number(4096 + 64, 8), number(4096 + 72, 8)),
        (3, 0),
        "change counters"
    );
}

#[test]
fn the_golden_entries_and_rows_have_their_fields_where_the_document_says() {
    let file = golden_row_file();
    let number = |at, bytes| number_at(&file, at, bytes);
    let entry = 8192 + 3 * 128;
    assert_eq!(&file[entry..entry + 68], datagen::key(3).as_bytes());
    assert_eq!(
        (number(entry + 68, 1), number(entry + 69, 1)),
        (68, 1),
        "key length, state"
    );
    assert_eq!(
        (number(entry + 70, 2), number(entry + 72, 4)),
        (0, 2),
        "reserved, incarnation"
    );
    assert_eq!(
        (number(entry + 76, 8), number(entry + 84, 4)),
        (43, 2),
        "counter, epoch"
    );
    assert_eq!(
        (number(entry + 88, 4), number(entry + 92, 8)),
        (5000, 103),
        "length, store order"
    );
    assert_eq!(number(entry + 100, 4), 1_700_000_003, "access time");
    assert_eq!(
        (number(entry + 112, 8), number(entry + 120, 4)),
        (0, 0),
        "tag's end, reserved"
    );
    assert!(
        file[8192 + 128..8192 + 3 * 128]
            .iter()
            .all(|byte| *byte == 0),
        "rows 1 and 2 free"
    );
    let row = 8192 + 4096 + 3 * 8192;
    assert_eq!(file[row..row + 5000], datagen::payload(3));
    assert!(file[row + 5000..row + 8192].iter().all(|byte| *byte == 0));
}

fn golden_row_file() -> Vec<u8> {
    let mut files = tree(&golden());
    files.retain(|name, _| name.ends_with("rows/g1/0123456789abcdef.rows"));
    files.pop_first().unwrap().1
}

/// The little-endian number of `bytes` bytes at `at`.
fn number_at(file: &[u8], at: usize, bytes: usize) -> u64 {
    file[at..at + bytes]
        .iter()
        .rev()
        .fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
}
