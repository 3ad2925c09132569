//! Leases of writers: taken, given back, taken away from the dead, and never hurt by strangers.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::job::Outcome;
use kvstrata_core::sys::fs::{Access, Direct, Directory, File, ShareMode};
use kvstrata_core::sys::process::ProcessIdentity;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::memory::leaked_arena;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, keys, options, row_files};

const CAPACITY: u64 = 4 << 20;
const DEAD: &str = "00000000000000000000000000000bad";

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(root: &TempDir) -> Harness {
    Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 100)
}

/// The directory of writers of the one namespace, after a tier has been there.
fn writers(root: &TempDir) -> PathBuf {
    let file = row_files(root.path()).pop().unwrap();
    file.ancestors().nth(3).unwrap().join("writers")
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = path
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Without a process of its own: one that is forked has a copy of every lock for an instant.
fn make_fifo(path: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

fn lock_file(directory: &Path) -> File {
    Directory::open_root(directory, false, ShareMode::Private)
        .unwrap()
        .open("lock", Access::Write, Direct::No)
        .unwrap()
}

/// A root in which something was stored by a tier that is closed.
fn used_root() -> TempDir {
    let root = root();
    let mut harness = open(&root);
    assert_eq!(harness.store(&keys(0..10)), [Outcome::Ok; 10]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    root
}

#[test]
fn a_tier_holds_its_lease_while_it_is_open_and_says_in_it_who_it_is() {
    let root = used_root();
    assert_eq!(names(&writers(&root)), Vec::<String>::new());
    let harness = open(&root);
    let [name] = &names(&writers(&root))[..] else {
        panic!("one writer is expected");
    };
    let directory = writers(&root).join(name);
    assert!(!lock_file(&directory).try_lock_exclusive().unwrap());
    let text = std::fs::read_to_string(directory.join("lock")).unwrap();
    assert_eq!(text, ProcessIdentity::own().to_string());
    harness.tier.close(Duration::from_secs(10)).unwrap();
    assert_eq!(names(&writers(&root)), Vec::<String>::new());
}

#[test]
fn leases_of_dead_writers_are_removed_at_open() {
    let root = used_root();
    let writers = writers(&root);
    std::fs::create_dir(writers.join(DEAD)).unwrap();
    std::fs::write(writers.join(DEAD).join("lock"), "host h\nprocess 1\n").unwrap();
    // Died before it could make its file.
    std::fs::create_dir(writers.join(DEAD.replace('b', "c"))).unwrap();
    let mut harness = open(&root);
    assert_eq!(names(&writers).len(), 1);
    assert!(!names(&writers).contains(&DEAD.to_owned()));
    assert_eq!(harness.load(&keys(0..10)), [Outcome::Ok; 10]);
}

#[test]
fn a_root_with_a_writer_that_has_not_ended_is_refused_with_its_words() {
    let root = used_root();
    let directory = writers(&root).join(DEAD);
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("lock"), "host somewhere\nprocess 12345\n").unwrap();
    let held = lock_file(&directory);
    assert!(held.try_lock_exclusive().unwrap());
    // The clock does not let the test wait as long as the tier does.
    let seams = Seams {
        clock: Arc::new(ManualClock::default()),
        ..Seams::default()
    };
    let arena = || leaked_arena(100 * ROW_BYTES, 0).unwrap();
    let options = options(root.path(), ROW_BYTES, CAPACITY);
    let refused = Tier::open_shared(options.clone(), arena(), seams.clone());
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("host somewhere, process 12345") && message.contains("has not ended"),
        "{message}"
    );
    drop(held);
    let tier = Tier::open_shared(options, arena(), seams).unwrap();
    assert!(!names(&writers(&root)).contains(&DEAD.to_owned()));
    drop(tier);
}

#[test]
fn what_strangers_put_among_the_leases_stays_and_hurts_nobody() {
    let root = used_root();
    let writers = writers(&root);
    let id = |digit: char| DEAD.replace('b', &digit.to_string());
    // A link, a FIFO and a file where a writer's directory would be.
    symlink("/etc", writers.join(id('1'))).unwrap();
    let fifo = writers.join(id('2'));
    make_fifo(&fifo);
    std::fs::write(writers.join(id('3')), "a file").unwrap();
    std::fs::write(writers.join("notes.txt"), "a stranger's").unwrap();
    // Writers' directories whose locks are a link, a FIFO, a directory.
    for digit in ['4', '5', '6'] {
        std::fs::create_dir(writers.join(id(digit))).unwrap();
    }
    symlink("/etc/passwd", writers.join(id('4')).join("lock")).unwrap();
    let fifo = writers.join(id('5')).join("lock");
    make_fifo(&fifo);
    std::fs::create_dir(writers.join(id('6')).join("lock")).unwrap();
    let strange = names(&writers);
    // A dead writer's lock that is very large, and one beside which a stranger's file lies.
    std::fs::create_dir(writers.join(id('7'))).unwrap();
    let huge = std::fs::File::create(writers.join(id('7')).join("lock")).unwrap();
    huge.set_len(1 << 40).unwrap();
    std::fs::create_dir(writers.join(id('8'))).unwrap();
    std::fs::write(writers.join(id('8')).join("notes.txt"), "a stranger's").unwrap();
    let mut harness = open(&root);
    assert_eq!(harness.load(&keys(0..10)), [Outcome::Ok; 10]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    let mut left = strange;
    left.push(id('8'));
    left.sort();
    assert_eq!(names(&writers), left);
    let kept = std::fs::read_to_string(writers.join(id('8')).join("notes.txt")).unwrap();
    assert_eq!(kept, "a stranger's");
}

#[test]
fn leases_are_part_of_the_space_that_is_used() {
    let root = used_root();
    let harness = open(&root);
    let writers = writers(&root);
    let blocks = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::symlink_metadata(path).unwrap().blocks() * 512
    };
    let own = writers.join(&names(&writers)[0]);
    let taken = blocks(&writers) + blocks(&own) + blocks(&own.join("lock"));
    assert!(taken > 0);
    let used = harness.stat("used_bytes");
    harness.tier.close(Duration::from_secs(10)).unwrap();
    // Beside a large capacity a lease is little; beside none at all it is all there is.
    let all: u64 = walk(root.path()).iter().map(|path| blocks(path)).sum();
    // Row files count with what their extents may come to take: of these a block each.
    let files = u64::try_from(row_files(root.path()).len()).unwrap();
    let on_disk = all + taken - blocks(&writers);
    assert_eq!(used, on_disk + files * 4096);
}

fn walk(path: &Path) -> Vec<PathBuf> {
    let mut found = vec![path.to_path_buf()];
    if path.is_dir() {
        for entry in path.read_dir().unwrap() {
            found.extend(walk(&entry.unwrap().path()));
        }
    }
    found
}

#[test]
fn a_lock_that_is_let_go_of_within_half_a_second_is_waited_for_and_no_other() {
    let root = used_root();
    let held = std::fs::File::options()
        .write(true)
        .open(root.path().join("kvstrata.lock"))
        .unwrap();
    held.lock().unwrap();
    // The manual clock moves as the opener waits.
    let clock = Arc::new(ManualClock::default());
    let seams = || Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    let begun = kvstrata_core::sys::clock::Clock::now(&*clock);
    let arena = || leaked_arena(ROW_BYTES, 0).unwrap();
    let own = || options(root.path(), ROW_BYTES, CAPACITY);
    let error = Tier::open_shared(own(), arena(), seams()).unwrap_err();
    assert!(error.to_string().contains("is in use by "), "{error}");
    let waited = kvstrata_core::sys::clock::Clock::now(&*clock).duration_since(begun);
    assert_eq!(waited, Duration::from_millis(500));
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
    });
    let tier = Tier::open_shared(own(), arena(), Seams::default()).unwrap();
    opener.join().unwrap();
    tier.close(Duration::from_secs(20)).unwrap();
}
