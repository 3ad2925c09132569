//! Bytes of a root that changed under the tier, or that a power cut left half written: misses, one
//! row each, and nothing else.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, key, keys, options, row_files};

const CAPACITY: u64 = 16 << 20;
const ENTRY: usize = 128;

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(root: &TempDir) -> Harness {
    Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16)
}

/// A root in which ten rows were stored, and was closed cleanly.
fn closed_with_ten_rows() -> (TempDir, Vec<Key>) {
    let (root, own) = (root(), keys(0..10));
    let mut harness = open(&root);
    assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    (root, own)
}

fn the_file(root: &Path) -> PathBuf {
    let files = row_files(root);
    assert_eq!(files.len(), 1);
    files.into_iter().next().unwrap()
}

fn find(bytes: &[u8], what: &[u8]) -> usize {
    bytes
        .windows(what.len())
        .position(|window| window == what)
        .unwrap()
}

/// Where the payload of a key lies in the bytes of a row file.
fn row_of(bytes: &[u8], key: &Key) -> usize {
    find(bytes, &payload(key.as_bytes(), ROW_BYTES))
}

/// Where the entry of a key lies in the bytes of a row file.
fn entry_of(bytes: &[u8], key: &Key) -> usize {
    find(bytes, key.as_bytes())
}

fn flip(path: &Path, at: usize) {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let (file, at) = (file.unwrap(), u64::try_from(at).unwrap());
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

fn overwrite(path: &Path, at: usize, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, u64::try_from(at).unwrap())
        .unwrap();
}

#[test]
fn a_flipped_bit_at_the_first_middle_or_last_byte_of_a_row_costs_that_row() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let bytes = std::fs::read(&path).unwrap();
    for (key, at) in own.iter().zip([0, ROW_BYTES / 2, ROW_BYTES - 1]) {
        flip(&path, row_of(&bytes, key) + at);
    }
    let mut harness = open(&root);
    let outcomes = harness.load(&own);
    assert_eq!(outcomes[..3], [Outcome::Corrupt; 3]);
    assert_eq!(outcomes[3..], [Outcome::Ok; 7]);
    assert_eq!(harness.stat("corrupt_rows"), 3);
    assert_eq!(harness.found(&own[..3]), [false; 3]);
    assert_eq!(harness.store(&own[..3]), [Outcome::Ok; 3]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
}

#[test]
fn any_flipped_bit_of_an_entry_costs_its_row_and_no_other() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let bytes = std::fs::read(&path).unwrap();
    // Key, key length, generation, epoch, payload bytes, store order, checksum, CRC.
    for at in [0, 68, 72, 84, 88, 92, 104, 124] {
        let entry = entry_of(&bytes, &own[4]);
        overwrite(&path, 0, &bytes);
        flip(&path, entry + at);
        let mut harness = open(&root);
        assert_eq!(harness.stat("junk"), 1, "byte {at}");
        let outcomes = harness.load(&own);
        for (position, outcome) in outcomes.iter().enumerate() {
            let expected = if position == 4 {
                Outcome::Miss
            } else {
                Outcome::Ok
            };
            assert_eq!(*outcome, expected, "byte {at}, row {position}");
        }
        assert_eq!(harness.store(&own[4..5]), [Outcome::Ok], "byte {at}");
        assert_eq!(harness.load(&own), [Outcome::Ok; 10], "byte {at}");
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn a_flipped_bit_of_a_superblock_costs_the_files_rows_and_serves_nothing_wrong() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let bytes = std::fs::read(&path).unwrap();
    // Magic, checksum kind, namespace, file id, row bytes, stride, row count, group, writer, CRC.
    for at in [0, 12, 16, 48, 56, 64, 72, 76, 80, 508] {
        for file in row_files(root.path()) {
            std::fs::remove_file(file).unwrap();
        }
        std::fs::write(&path, &bytes).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        flip(&path, at);
        let mut harness = open(&root);
        assert_eq!(harness.found(&own), [false; 10], "byte {at}");
        assert_eq!(harness.load(&own), [Outcome::Miss; 10], "byte {at}");
        assert_eq!(harness.store(&own), [Outcome::Ok; 10], "byte {at}");
        assert_eq!(harness.load(&own), [Outcome::Ok; 10], "byte {at}");
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn a_row_copied_over_another_row_is_corrupt_there() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let bytes = std::fs::read(&path).unwrap();
    let first = payload(own[0].as_bytes(), ROW_BYTES);
    overwrite(&path, row_of(&bytes, &own[1]), &first);
    let mut harness = open(&root);
    let outcomes = harness.load(&own);
    assert_eq!(outcomes[1], Outcome::Corrupt);
    assert_eq!(harness.load(&own[..1]), [Outcome::Ok]);
    assert_eq!(harness.found(&own[..2]), [true, false]);
    assert_eq!(harness.stat("corrupt_rows"), 1);
}

#[test]
fn a_row_copied_over_another_with_its_entry_is_still_a_miss() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let bytes = std::fs::read(&path).unwrap();
    let entry = entry_of(&bytes, &own[0]);
    overwrite(
        &path,
        row_of(&bytes, &own[1]),
        &payload(own[0].as_bytes(), ROW_BYTES),
    );
    overwrite(
        &path,
        entry_of(&bytes, &own[1]),
        &bytes[entry..entry + ENTRY],
    );
    let mut harness = open(&root);
    assert_eq!(harness.found(&own[..2]), [true, false]);
    assert_eq!(harness.load(&own[..2]), [Outcome::Ok, Outcome::Miss]);
    assert_eq!(harness.stat("junk"), 1);
}

#[test]
fn a_whole_file_under_the_name_of_another_is_not_used() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    std::fs::rename(&path, path.with_file_name("0123456789abcdef.rows")).unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.found(&own), [false; 10]);
    assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
}

#[test]
fn what_a_power_cut_tore_is_a_miss_and_counted_apart_from_corruption() {
    let (root, own) = (root(), keys(0..10));
    let mut harness = open(&root);
    assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    let path = the_file(root.path());
    // What the disk had when the power went: the file as it is now, without a clean mark, and the
    // tail of a row not written yet.
    let bytes = std::fs::read(&path).unwrap();
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(harness);
    overwrite(&path, 0, &bytes);
    overwrite(
        &path,
        row_of(&bytes, &own[3]) + 4096,
        &[0; ROW_BYTES - 4096],
    );
    overwrite(&path, row_of(&bytes, &own[4]), &[0; ROW_BYTES]);
    let mut harness = open(&root);
    let outcomes = harness.load(&own);
    assert!(!outcomes[3].is_success() && !outcomes[4].is_success());
    assert_eq!(
        outcomes.iter().filter(|one| **one == Outcome::Ok).count(),
        8
    );
    assert_eq!(harness.found(&own[3..5]), [false; 2]);
    assert_eq!(
        (harness.stat("torn_rows"), harness.stat("corrupt_rows")),
        (2, 0)
    );
    assert_eq!(harness.store(&own[3..5]), [Outcome::Ok; 2]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
}

#[test]
fn files_that_others_remove_cost_their_rows_and_every_eviction_goes_on() {
    let root = root();
    // 32 files for two groups: a row file holds five rows or so.
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 3 << 20), 64);
    let own = keys(0..50);
    assert_eq!(harness.store(&own), [Outcome::Ok; 50]);
    let files = row_files(root.path());
    assert!(files.len() >= 8, "{}", files.len());
    for path in files.iter().step_by(2) {
        std::fs::remove_file(path).unwrap();
    }
    let outcomes = harness.load(&own);
    let lost = outcomes.iter().filter(|one| **one == Outcome::Miss).count();
    let kept = outcomes.iter().filter(|one| **one == Outcome::Ok).count();
    assert_eq!(lost + kept, 50);
    assert!(lost > 0 && kept > 0, "{lost} {kept}");
    // The rest vanishes too, and everything has to make room.
    for path in row_files(root.path()) {
        std::fs::remove_file(path).unwrap();
    }
    for round in 1..20 {
        // A store into a file that is gone fails, and the file is known to be gone from then on.
        harness.store(&keys(round * 1000..round * 1000 + 50));
        assert!(harness.stat("used_bytes") <= 3 << 20);
    }
    assert_eq!(harness.store(&own), [Outcome::Ok; 50]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 50]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    for path in row_files(root.path()) {
        std::fs::remove_file(path).unwrap();
    }
    let harness = Harness::open(options(root.path(), ROW_BYTES, 3 << 20), 64);
    assert_eq!(harness.stat("rows"), 0);
    assert!(
        harness.stat("used_bytes") < 1 << 20,
        "only directories are left"
    );
}

#[test]
fn a_row_file_that_became_a_link_is_never_followed() {
    let (root, own) = closed_with_ten_rows();
    let path = the_file(root.path());
    let elsewhere = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let target = elsewhere.path().join("other.rows");
    std::fs::copy(&path, &target).unwrap();
    let before = std::fs::read(&target).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.found(&own), [false; 10]);
    assert_eq!(harness.load(&own), [Outcome::Miss; 10]);
    assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    // Also one that is swapped in while the tier runs.
    let path = row_files(root.path())
        .into_iter()
        .find(|path| !path.is_symlink())
        .unwrap();
    std::fs::rename(&path, elsewhere.path().join("moved.rows")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("moved.rows"), &path).unwrap();
    harness.tier.close(Duration::from_secs(10)).unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.load(&own), [Outcome::Miss; 10]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), before);
}

#[test]
fn ranks_that_share_a_root_never_see_each_others_rows() {
    let root = root();
    let own = keys(0..20);
    let rank = |rank: u32, row_bytes: usize| {
        let mut options = options(root.path(), row_bytes, 64 << 20);
        let shard = serde_json::json!({"tp": [rank % 4, 4], "pp": [rank / 4, 2]});
        options.identity.insert("shard".to_owned(), shard);
        options
    };
    // Payloads differ by rank: rank r stores what key + 1000 r would have.
    let numbers = |rank: u32, of: u64| key(of + 1000 * u64::from(rank), 0);
    for at in 0..8 {
        let mut harness = Harness::open(rank(at, ROW_BYTES), 20);
        let bytes: Vec<Key> = (0..20).map(|of| numbers(at, of)).collect();
        harness.fill(&bytes);
        let job = harness.job();
        harness.tier.store(job, &own, &harness.offsets(20)).unwrap();
        assert_eq!(harness.result(job).outcomes, [Outcome::Ok; 20], "rank {at}");
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    for at in 0..8 {
        let mut harness = Harness::open(rank(at, ROW_BYTES), 20);
        harness.wipe();
        let job = harness.begin_load(&own);
        assert_eq!(harness.result(job).outcomes, [Outcome::Ok; 20], "rank {at}");
        for of in 0..20 {
            let slot = usize::try_from(of).unwrap();
            assert!(harness.holds(slot, &numbers(at, of)), "rank {at} row {of}");
        }
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    // Rows of another size are another namespace, never another rank's bytes.
    let mut harness = Harness::open(rank(0, 2 * ROW_BYTES), 20);
    assert_eq!(harness.found(&own), [false; 20]);
    assert_eq!(harness.load(&own), [Outcome::Miss; 20]);
    // And nobody else is let in meanwhile.
    let arena = leaked_arena(20 * ROW_BYTES, 0).unwrap();
    let second = Tier::open_shared(rank(1, ROW_BYTES), arena, Seams::default());
    assert_eq!(second.unwrap_err().kind(), ErrorKind::Config);
}
