//! Recency survives a process that ends without closing the tier.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::config::TierOptions;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::GroupId;
use kvstrata_core::tier::Seams;
use kvstrata_testkit::clock::ManualClock;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, key, keys, options, row_files};

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Room for 64 rows of one group in 32 files.
fn small(root: &Path) -> TierOptions {
    let mut own = options(root, ROW_BYTES, 32 * (8192 + 4096 + 2 * 8192) + 12 * 4096);
    own.row_bytes = BTreeMap::from([(GroupId(0), tier_support::wide(ROW_BYTES))]);
    own
}

fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(status.unwrap().success());
}

/// Wakes the writer thread until every touched page is written.
fn until_written(harness: &mut Harness) {
    let begun = Instant::now();
    while harness.stat("touched_pages") > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "touches stay in memory"
        );
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    // The writer thread takes this up once it has written the last of them.
    harness.store(&keys([0]));
}

/// What a process that is killed now would leave: a copy of the root, opened.
fn killed_now(root: &TempDir, copies: &TempDir) -> Harness {
    let to = copies.path().join("kv");
    let _ = std::fs::remove_dir_all(&to);
    copy(root.path(), &to);
    Harness::open(small(&to), 64)
}

#[test]
fn a_touch_is_in_the_row_table_after_thirty_seconds_and_a_kill() {
    let (root, copies) = (root(), root());
    let clock = Arc::new(ManualClock::default());
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    let mut harness = Harness::open_with(small(root.path()), 64, seams);
    assert_eq!(harness.store(&keys(0..64)), [Outcome::Ok; 64]);
    // The tail is the next to go, but for a touch; and a load is one as well.
    clock.advance(Duration::from_secs(5));
    harness.tier.touch(&keys(62..64)).unwrap();
    assert_eq!(harness.load(&keys([61])), [Outcome::Ok]);
    let pages = harness.stat("touched_pages");
    assert_eq!(pages, 2, "rows 61, 62 and 63 lie in two files");
    clock.advance(Duration::from_secs(9));
    for _ in 0..20 {
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(harness.stat("touched_pages"), pages, "too early");
    {
        let mut lost = killed_now(&root, &copies);
        assert_eq!(lost.store(&keys(100..103)), [Outcome::Ok; 3]);
        assert_eq!(lost.found(&keys(60..64)), [true, false, false, false]);
    }
    clock.advance(Duration::from_secs(16));
    until_written(&mut harness);
    let mut kept = killed_now(&root, &copies);
    assert_eq!(kept.store(&keys(100..103)), [Outcome::Ok; 3]);
    assert_eq!(
        kept.found(&keys(57..64)),
        [true, false, false, false, true, true, true]
    );
    assert_eq!(kept.load(&keys(61..64)), [Outcome::Ok; 3]);
    // Touched again, it is written again; and what was evicted meanwhile is not brought back.
    harness.tier.touch(&keys([0, 60])).unwrap();
    clock.advance(Duration::from_secs(5));
    harness.tier.touch(&keys([60])).unwrap();
    assert_eq!(harness.store(&keys(200..230)), [Outcome::Ok; 30]);
    clock.advance(Duration::from_secs(30));
    until_written(&mut harness);
    let kept = killed_now(&root, &copies);
    let numbers: Vec<u64> = (0..64).chain(200..230).collect();
    let own = keys(numbers);
    assert_eq!(kept.found(&own), harness.found(&own));
    assert_eq!(kept.stat("rows"), 64);
}

#[test]
fn a_file_is_not_written_before_its_incarnation_is_raised_and_never_without_a_touch() {
    let root = root();
    {
        let mut harness = Harness::open(small(root.path()), 64);
        assert_eq!(harness.store(&keys(0..64)), [Outcome::Ok; 64]);
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let files = row_files(root.path());
    let read = |path: &Path| {
        let file = std::fs::File::open(path).unwrap();
        let mut bytes = vec![0; 3 * 4096];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let incarnation = |bytes: &[u8]| u32::from_le_bytes(bytes[96..100].try_into().unwrap());
    let before: Vec<Vec<u8>> = files.iter().map(|path| read(path)).collect();
    let clock = Arc::new(ManualClock::default());
    // Later than any second the real clock wrote above.
    clock.advance(Duration::from_secs(2_000_000_000));
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    let mut harness = Harness::open_with(small(root.path()), 64, seams);
    assert_eq!(harness.load(&keys(0..2)), [Outcome::Ok; 2]);
    assert_eq!(harness.stat("touched_pages"), 1, "two rows of one file");
    clock.advance(Duration::from_secs(30));
    until_written(&mut harness);
    let after: Vec<Vec<u8>> = files.iter().map(|path| read(path)).collect();
    let changed: Vec<usize> = (0..files.len())
        .filter(|at| before[*at] != after[*at])
        .collect();
    assert_eq!(changed.len(), 1, "one file of 32 was touched");
    let (old, new) = (&before[changed[0]], &after[changed[0]]);
    assert_eq!(incarnation(new), incarnation(old) + 1);
    // In the table two entries changed, each in its access time and CRC alone.
    for row in 0..2 {
        let entry = 8192 + row * 128..8192 + row * 128 + 128;
        let differing: Vec<usize> = entry.clone().filter(|at| old[*at] != new[*at]).collect();
        let times = entry.start + 100..entry.start + 104;
        let crc = entry.start + 124..entry.start + 128;
        assert!(differing.iter().any(|at| times.contains(at)));
        assert!(
            differing
                .iter()
                .all(|at| times.contains(at) || crc.contains(at))
        );
    }
    // Again nothing is touched: nothing is written, however long it takes.
    clock.advance(Duration::from_mins(10));
    for _ in 0..20 {
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    for (path, bytes) in files.iter().zip(&after) {
        assert_eq!(&read(path), bytes);
    }
}

/// The child of the next test: stores, touches, says so, and waits to be killed.
#[test]
#[ignore = "a part of the next test"]
fn child_that_touches_and_waits() {
    let Some(root) = std::env::var_os("KVSTRATA_TEST_TOUCH_ROOT") else {
        return;
    };
    let mut harness = Harness::open(small(Path::new(&root)), 64);
    assert_eq!(harness.store(&keys(0..64)), [Outcome::Ok; 64]);
    std::thread::sleep(Duration::from_millis(2100));
    harness.tier.touch(&[key(63, 0)]).unwrap();
    println!("touched");
    std::io::stdout().flush().unwrap();
    std::thread::sleep(Duration::from_mins(10));
}

#[test]
#[ignore = "takes half a minute"]
fn a_process_killed_thirty_seconds_after_a_touch_has_recorded_it() {
    let root = root();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_that_touches_and_waits",
            "--ignored",
            "--nocapture",
        ])
        .env("KVSTRATA_TEST_TOUCH_ROOT", root.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("touched")));
    std::thread::sleep(Duration::from_secs(30));
    child.kill().unwrap();
    child.wait().unwrap();
    let mut harness = Harness::open(small(root.path()), 64);
    assert_eq!(harness.found(&keys([63])), [true]);
    assert_eq!(harness.store(&keys([100])), [Outcome::Ok]);
    assert_eq!(harness.found(&keys([62, 63])), [false, true]);
}
