//! What others do to a root, and calls in unlucky order.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvstrata_core::config::Size;
use kvstrata_core::job::Outcome;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, assert_accounted, keys, options, row_files};

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
fn keys_removed_right_after_their_store_was_asked_are_never_seen() {
    let root = root();
    let own = keys(0..600);
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 16 << 20), 600);
    for _ in 0..5 {
        let job = harness.begin_store(&own);
        harness.tier.remove(&own).unwrap();
        let outcomes = harness.result(job).outcomes;
        // A row may be stored before the removal comes: then the removal takes it away.
        let is_expected = |of: &Outcome| matches!(of, Outcome::Dropped | Outcome::Ok);
        assert!(outcomes.iter().all(is_expected), "{outcomes:?}");
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

fn epochs(root: &TempDir) -> PathBuf {
    namespace(root).join("epochs")
}

#[test]
fn a_reset_is_recorded_also_when_the_record_was_removed_while_the_tier_is_open() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
        assert!(harness.tier.reset().unwrap());
        let epoch = harness.stat("epoch");
        assert_eq!(harness.store(&own[..5]), [Outcome::Ok; 5]);
        std::fs::remove_dir_all(epochs(&root)).unwrap();
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.stat("epoch"), epoch + 1);
        assert_eq!(harness.store(&own[5..7]), [Outcome::Ok; 2]);
        // Removed and made again by someone else, with a record that is long out of date.
        std::fs::remove_dir_all(epochs(&root)).unwrap();
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(epochs(&root))
            .unwrap();
        std::fs::write(epochs(&root).join("0000000001"), b"").unwrap();
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.found(&own), [false; 10]);
        assert_eq!(harness.store(&own[7..8]), [Outcome::Ok]);
        assert_accounted(&harness, root.path());
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let mut harness = open(&root);
    let mut expected = [false; 10];
    expected[7] = true;
    assert_eq!(harness.found(&own), expected);
    assert_eq!(harness.load(&own[7..8]), [Outcome::Ok]);
}

#[test]
fn a_record_beyond_the_last_epoch_is_a_strangers_and_resets_go_on() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    }
    std::fs::write(epochs(&root).join("4294967295"), b"").unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.stat("junk"), 1);
    let notices = harness.tier.take_notices();
    assert!(notices.iter().any(|notice| notice.text.contains("epochs")));
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
    for _ in 0..3 {
        assert!(harness.tier.reset().unwrap());
    }
    assert_eq!(harness.found(&own), [false; 10]);
    assert_eq!(harness.store(&own[..2]), [Outcome::Ok; 2]);
    drop(harness);
    let harness = open(&root);
    assert_eq!(harness.found(&own[..3]), [true, true, false]);
    assert!(epochs(&root).join("4294967295").exists());
}

#[test]
fn the_end_of_all_epochs_gives_everything_up_rather_than_use_a_number_twice() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    }
    std::fs::write(epochs(&root).join("4000000000"), b"").unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.stat("epoch"), 1);
    assert_eq!(harness.found(&own), [false; 10]);
    assert_accounted(&harness, root.path());
    assert_eq!(harness.store(&own[..4]), [Outcome::Ok; 4]);
    assert!(harness.tier.reset().unwrap());
    assert_eq!(harness.store(&own[4..]), [Outcome::Ok; 6]);
    drop(harness);
    let mut harness = open(&root);
    assert_eq!(harness.stat("epoch"), 2);
    assert_eq!(harness.found(&own[..4]), [false; 4]);
    assert_eq!(harness.load(&own[4..]), [Outcome::Ok; 6]);
}

#[test]
fn an_entry_of_an_epoch_beyond_the_last_is_no_row_and_costs_no_other() {
    use kvstrata_core::format::row_table::RowEntry;
    use kvstrata_core::format::superblock::FileId;
    let root = root();
    let own = keys(0..3);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 3]);
    }
    let path = row_files(root.path()).pop().unwrap();
    let id = FileId(u64::from_str_radix(path.file_stem().unwrap().to_str().unwrap(), 16).unwrap());
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut bytes = [0; 128];
    file.read_exact_at(&mut bytes, 8192).unwrap();
    let mut entry = RowEntry::decode(&bytes, id, 0).unwrap().unwrap();
    entry.epoch = u32::MAX;
    file.write_all_at(&entry.encode(id, 0), 8192).unwrap();
    let mut harness = open(&root);
    assert_eq!(
        harness.found(&own).iter().filter(|found| **found).count(),
        2
    );
    assert_eq!(harness.stat("epoch"), 1);
    assert!(harness.tier.reset().unwrap());
    assert_eq!(harness.store(&own), [Outcome::Ok; 3]);
}

/// Puts something in the place of the only row file, stores more rows than one file has left, and
/// expects the file to be lost as a whole, at once.
fn a_replaced_file_is_lost(replace: impl FnOnce(&Path)) {
    let root = root();
    let own = keys(0..4);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 4]);
    }
    // Opened anew, no descriptor of the file is open.
    let mut harness = open(&root);
    let [path] = row_files(root.path()).try_into().unwrap();
    std::fs::remove_file(&path).unwrap();
    replace(&path);
    // The file had two rows left.
    let more = keys(20..24);
    let failed = [Outcome::IoError, Outcome::IoError, Outcome::Ok, Outcome::Ok];
    assert_eq!(harness.store(&more), failed);
    assert_eq!(harness.stat("lost_files"), 1);
    assert_eq!(harness.stat("retired_rows"), 0);
    assert_eq!(harness.found(&own), [false; 4]);
    assert_eq!(harness.store(&keys(20..22)), [Outcome::Ok; 2]);
    assert_eq!(harness.load(&more), [Outcome::Ok; 4]);
    assert_eq!(harness.stat("lost_files"), 1);
    // What is there now belongs to someone else.
    assert!(std::fs::symlink_metadata(&path).is_ok());
    assert_eq!(std::fs::symlink_metadata(&path).unwrap().blocks(), 0);
    assert_accounted(&harness, root.path());
    drop(harness);
    let harness = open(&root);
    assert_eq!(harness.found(&more), [true; 4]);
    assert!(std::fs::symlink_metadata(&path).is_ok());
    assert_accounted(&harness, root.path());
}

#[test]
fn a_file_replaced_by_a_fifo_is_lost_at_once_and_nothing_hangs() {
    a_replaced_file_is_lost(|path| {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    });
}

#[test]
fn a_file_replaced_by_a_link_is_lost_at_once_and_the_link_is_not_followed() {
    a_replaced_file_is_lost(|path| {
        std::os::unix::fs::symlink("elsewhere", path).unwrap();
        assert!(!path.with_file_name("elsewhere").exists());
    });
}

#[test]
fn a_file_that_was_being_made_is_removed_quietly_and_counted() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = open(&root);
        assert_eq!(harness.store(&own), [Outcome::Ok; 10]);
    }
    let left = row_files(root.path())[0].with_file_name("00000000000000ab.rows.tmp");
    std::fs::write(&left, vec![0; 100_000]).unwrap();
    let mut harness = open(&root);
    assert!(!left.exists());
    assert_eq!((harness.stat("leftovers"), harness.stat("junk")), (1, 0));
    let notices = harness.tier.take_notices();
    assert!(notices.iter().all(|notice| !notice.text.contains(".tmp")));
    assert_accounted(&harness, root.path());
    assert_eq!(harness.load(&own), [Outcome::Ok; 10]);
}

#[test]
fn files_that_cannot_be_written_cost_no_row_and_are_tried_again() {
    let root = root();
    // Room for 64 rows in all.
    let mut few = options(
        root.path(),
        ROW_BYTES,
        32 * (8192 + 4096 + 2 * 8192) + 12 * 4096,
    );
    few.row_bytes.retain(|group, _| group.0 == 0);
    let own = keys(0..64);
    {
        let mut harness = Harness::open(few.clone(), 64);
        assert_eq!(harness.store(&own), [Outcome::Ok; 64]);
        // What names take differs from one file system to another: not room for a file more.
        few.capacity = Size::Bytes(harness.stat("used_bytes") + 8192);
    }
    let files = row_files(root.path());
    let attribute = |change: &str, files: &[PathBuf]| {
        let status = std::process::Command::new("chattr")
            .arg(change)
            .args(files)
            .stderr(std::process::Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    if !attribute("+i", &files) {
        eprintln!("skipped: files cannot be made immutable here");
        return;
    }
    let clock = std::sync::Arc::new(kvstrata_testkit::clock::ManualClock::default());
    let seams = kvstrata_core::tier::Seams {
        clock: std::sync::Arc::<kvstrata_testkit::clock::ManualClock>::clone(&clock),
        ..Default::default()
    };
    let mut harness = Harness::open_with(few, 64, seams);
    let refused: Vec<Vec<Outcome>> = (0..5)
        .map(|n| harness.store(&keys(100 + n..101 + n)))
        .collect();
    let (evicted, found) = (harness.stat("evicted_rows"), harness.found(&own));
    let loaded = harness.load(&own);
    // One file takes rows again: only its two rows can go.
    assert!(attribute("-i", &files[..1]));
    clock.advance(Duration::from_secs(30));
    let taken = harness.store(&keys(200..203));
    assert!(attribute("-i", &files[1..]));
    assert_eq!(refused, vec![[Outcome::NoSpace]; 5]);
    assert_eq!((evicted, found), (0, vec![true; 64]));
    assert_eq!(loaded, [Outcome::Ok; 64]);
    assert_eq!(taken, [Outcome::Ok, Outcome::Ok, Outcome::NoSpace]);
    assert_eq!(harness.stat("evicted_rows"), 2);
    assert_eq!(harness.stat("retired_rows"), 0);
    clock.advance(Duration::from_secs(30));
    assert_eq!(harness.store(&keys(300..310)), [Outcome::Ok; 10]);
    assert_accounted(&harness, root.path());
}
