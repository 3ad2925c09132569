//! What others do to a root, and calls in unlucky order.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::path::PathBuf;
use std::time::Duration;

use kvstrata_core::job::Outcome;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, keys, options, row_files};

const CAPACITY: u64 = 4 << 20;

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(root: &TempDir) -> Harness {
    Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 600)
}

fn namespace(root: &TempDir) -> PathBuf {
    let file = row_files(root.path()).pop().unwrap();
    file.ancestors().nth(3).unwrap().to_path_buf()
}

#[test]
fn keys_removed_before_their_store_is_planned_are_never_seen() {
    let root = root();
    let own = keys(0..600);
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 16 << 20), 600);
    for _ in 0..5 {
        let job = harness.begin_store(&own);
        harness.tier.remove(&own).unwrap();
        let outcomes = harness.result(job).outcomes;
        assert_eq!(outcomes, vec![Outcome::Dropped; 600]);
        assert_eq!(harness.found(&own), vec![false; 600]);
    }
    assert_eq!(harness.store(&own), vec![Outcome::Ok; 600]);
    assert_eq!(harness.load(&own), vec![Outcome::Ok; 600]);
}

#[test]
fn a_lost_epoch_record_does_not_undo_a_reset_after_which_nothing_was_stored() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
        assert!(harness.tier.reset().unwrap());
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    std::fs::remove_dir_all(namespace(&root).join("epochs")).unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.found(&own), [false; 10]);
    assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
}

#[test]
fn files_of_strangers_neither_count_nor_go() {
    let root = root();
    let own = keys(0..10);
    let used = {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
        harness.stat("used_bytes")
    };
    let big = vec![7; 2 * usize::try_from(CAPACITY).unwrap()];
    let strangers = [
        root.path().join("core.1234"),
        root.path().join("probe.notes.tmp"),
        namespace(&root).join("notes.txt"),
        namespace(&root).join("mine/deep/notes.txt"),
        namespace(&root).join("rows/backup/notes.txt"),
        namespace(&root).join("rows/g0/notes.txt"),
    ];
    for path in &strangers {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, &big).unwrap();
    }
    let mut harness = open(&root);
    // Their names may take a block more in our directories.
    assert!(harness.stat("used_bytes") <= used + 5 * 4096);
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
    assert_eq!(harness.store(&keys(20..30)), [Outcome::Ok; 10]);
    for path in &strangers {
        assert_eq!(std::fs::metadata(path).unwrap().len(), 2 * CAPACITY);
    }
}
