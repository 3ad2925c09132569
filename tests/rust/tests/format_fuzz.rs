//! Parsers of what lies on disk, fed with what nobody would write. Alone in its process, whose
//! allocations it watches.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a test fails where these fail"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crc_fast::CrcAlgorithm::Crc32IsoHdlc;
use kvstrata_core::format::change_page::ChangePage;
use kvstrata_core::format::checksum::ChecksumKind;
use kvstrata_core::format::geometry::Geometry;
use kvstrata_core::format::row_table::{ENTRY_BYTES, Generation, RowEntry};
use kvstrata_core::format::superblock::{FileId, NamespaceDigest, Superblock, WriterId};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::namespace::{Manifest, Namespace, layout};
use kvstrata_core::sys::fs::{Directory, ShareMode};
use kvstrata_testkit::payload::next;
use serde_json::Value;

/// Remembers the largest allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator is unsafe by nature")]
// SAFETY: everything is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

const ROW_BYTES: u64 = 65536;
const FILE: FileId = FileId(0x0123_4567_89AB_CDEF);

fn superblock() -> Superblock {
    Superblock {
        namespace: NamespaceDigest([7; 32]),
        file_id: FILE,
        geometry: Geometry::new(GroupId(1), ROW_BYTES, 100).unwrap(),
        writer: WriterId([9; 16]),
        incarnation: 3,
        clean_store_order: 55,
        checksum_kind: ChecksumKind::Crc64Nvme,
    }
}

fn entry() -> RowEntry {
    let mut key = [5; 36];
    key[32..].copy_from_slice(&1_u32.to_be_bytes());
    RowEntry {
        key: Key::new(&key).unwrap(),
        generation: Generation {
            incarnation: 3,
            counter: 12,
        },
        epoch: 2,
        payload_bytes: u32::try_from(ROW_BYTES).unwrap(),
        store_order: 77,
        access_time: 1_800_000_000,
        checksum: [3; 16],
    }
}

fn manifest() -> Manifest {
    let identity = serde_json::json!({"model": "m", "rope": {"factor": 8.0, "kind": ["a", null]}});
    let Value::Object(identity) = identity else {
        panic!("an object")
    };
    Manifest::new(identity, &BTreeMap::from([(GroupId(1), ROW_BYTES)])).unwrap()
}

/// CRC-32 of `bytes` and then `more`.
fn crc32(bytes: &[u8], more: &[u8]) -> [u8; 4] {
    let mut digest = crc_fast::Digest::new(Crc32IsoHdlc);
    digest.update(bytes);
    digest.update(more);
    u32::try_from(digest.finalize()).unwrap().to_le_bytes()
}

/// Numbers that parsers stumble over, and any others.
fn number(state: &mut u64) -> u64 {
    let any = next(state);
    match any % 12 {
        0 => 0,
        1 => u64::MAX,
        2 => u64::from(u32::MAX),
        3 => 1 << 31,
        4 => 1 << 63,
        5 => 4095,
        6 => 4096,
        7 => u64::from(u32::MAX) + 1,
        _ => any,
    }
}

/// Up to eight changes: bits, numbers, copied ranges.
fn mutate(bytes: &mut [u8], state: &mut u64) {
    let length = u64::try_from(bytes.len()).unwrap();
    let place = |state: &mut u64| usize::try_from(next(state) % length).unwrap();
    for _ in 0..=next(state) % 8 {
        let at = place(state);
        match next(state) % 4 {
            0 => bytes[at] ^= 1 << (next(state) % 8),
            1 => bytes[at] = u8::try_from(next(state) % 256).unwrap(),
            2 => {
                let number = number(state).to_le_bytes();
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            _ => {
                let from = place(state);
                let count = (place(state) % 64).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + count, at);
            }
        }
    }
}

/// What was decoded must be something that could have been written.
fn check_superblock(bytes: &[u8]) -> bool {
    let Ok(found) = Superblock::decode(bytes) else {
        return false;
    };
    assert!(found.geometry.row_count() > 0 && found.geometry.row_bytes() > 0);
    assert!(found.geometry.file_bytes() <= (1 << 30) + (1 << 20));
    assert_eq!(Superblock::decode(&found.encode()), Ok(found));
    true
}

fn check_entry(bytes: &[u8; ENTRY_BYTES], row: u32) -> bool {
    let Ok(Some(found)) = RowEntry::decode(bytes, FILE, row) else {
        return false;
    };
    let again = found.encode(FILE, row);
    assert_eq!(RowEntry::decode(&again, FILE, row), Ok(Some(found)));
    // Whether or not it is one of this file, asking must not fail.
    let _ = found.check(&superblock().geometry);
    true
}

/// Feeds `count` inputs to every parser and returns how many of each kind were accepted.
fn feed(count: u64, mut state: u64) -> [u64; 2] {
    let state = &mut state;
    let (block, row) = (superblock().encode(), entry().encode(FILE, 9));
    let mut name_bytes = *b"0123456789abcdef.rows";
    let mut page = ChangePage::default().encode();
    let mut accepted = [0; 2];
    for number in 0..count {
        // Five hundred counters of any value: a sixteenth says as much.
        if number % 16 == 0 {
            mutate(&mut page, state);
            assert_eq!(ChangePage::decode(&page).encode().len(), page.len());
        }
        let sealed = next(state).is_multiple_of(2);
        let mut bytes = block;
        mutate(&mut bytes[..512], state);
        if sealed {
            let crc = crc32(&bytes[..508], &[]);
            bytes[508..512].copy_from_slice(&crc);
        }
        let cut = usize::try_from(next(state) % 5000)
            .unwrap()
            .min(bytes.len());
        let whole = if next(state).is_multiple_of(4) {
            &bytes[..cut]
        } else {
            &bytes[..]
        };
        accepted[0] += u64::from(check_superblock(whole));

        let mut bytes = row;
        mutate(&mut bytes, state);
        if sealed {
            let place = [&FILE.0.to_le_bytes()[..], &9_u32.to_le_bytes()].concat();
            let crc = crc32(&bytes[..124], &place);
            bytes[124..].copy_from_slice(&crc);
        }
        accepted[1] += u64::from(check_entry(&bytes, 9));

        mutate(&mut name_bytes, state);
        let name = String::from_utf8_lossy(&name_bytes);
        let _ = layout::parse_row_file_name(&name);
        let _ = layout::parse_epoch_name(&name);
        let _ = layout::parse_group_name(&name);
        let _ = layout::parse_writer_name(&name);
        let _ = layout::is_directory_name(&name);
    }
    accepted
}

/// Opens a namespace with as many damaged manifests; returns how many were accepted.
fn open_manifests(count: u64, mut state: u64) -> u64 {
    let state = &mut state;
    // In memory: every opening syncs.
    let place = kvstrata_testkit::memory::folder().unwrap();
    let root = Directory::open_root(&place.path().join("root"), true, ShareMode::Private).unwrap();
    let manifest = manifest();
    let namespace = Namespace::open(&root, &manifest).unwrap();
    let path = namespace.directory().path_of("namespace.json");
    let text = std::fs::read(&path).unwrap();
    let mut accepted = 0;
    for _ in 0..count {
        let mut bytes = text.clone();
        mutate(&mut bytes, state);
        std::fs::write(&path, &bytes).unwrap();
        // Only what says the same is accepted: in other words, perhaps, or with other white space.
        if Namespace::open(&root, &manifest).is_ok() {
            let stored: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(stored["manifest"]["model"], "m");
            accepted += 1;
        }
    }
    accepted
}

fn no_input_of(count: u64, seed: u64) {
    // One at a time: the largest allocation is the process's.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap();
    LARGEST.store(0, Ordering::Relaxed);
    let accepted = feed(count, seed);
    let largest = LARGEST.load(Ordering::Relaxed);
    let limit = usize::try_from(ROW_BYTES).unwrap();
    assert!(largest <= limit, "{largest} bytes were asked for at once");
    assert!(largest > 0, "nobody watched");
    // Not everything is refused at the door: inputs get past the checksums.
    let enough = count / 100;
    assert!(accepted.iter().all(|some| *some > enough), "{accepted:?}");
    // Text takes a file each: a five hundredth as many.
    let texts = count / 500;
    assert!(open_manifests(texts, seed) < texts / 2);
}

#[test]
fn a_hundred_thousand_wrong_inputs_make_no_parser_panic_or_ask_for_much() {
    no_input_of(100_000, 1);
}

#[test]
#[ignore = "takes longer; part of make test-long"]
fn a_million_wrong_inputs_make_no_parser_panic_or_ask_for_much() {
    no_input_of(1_000_000, 2);
}
