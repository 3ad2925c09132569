//! Opening on many stored rows. Alone in its process: it counts the memory that is allocated.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it measured"
)]

use std::path::Path;
use std::time::Duration;

use kvstrata_core::key::Key;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::tier::Tier;
use kvstrata_testkit::allocation::Counting;
use kvstrata_testkit::memory::leaked;
use kvstrata_testkit::stored_rows::{key, make, options};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const ROWS: u64 = 200_000;
/// Bytes of memory that a listed row may take, with its part of the eviction policy.
const ROW_MEMORY_MAX: usize = 96;

fn open(root: &Path) -> Tier {
    Tier::open(options(root), leaked(4096, 0).unwrap()).unwrap()
}

/// Puts what is not ours, or not whole, beside the row files.
fn add_junk(root: &Path) -> usize {
    let namespace = root
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.is_dir())
        .unwrap();
    let rows = namespace.join("rows/g0");
    let strange = [
        "x",
        "0.rows",
        "00000000000000FF.rows",
        "core.1",
        ".hidden",
        "a b",
    ];
    for name in strange {
        std::fs::write(rows.join(name), "junk").unwrap();
    }
    std::fs::create_dir(rows.join("00000000000000f0.rows")).unwrap();
    // With our names, and not row files.
    for name in [
        "00000000000000f1.rows",
        "00000000000000f2.rows",
        "00000000000000f3.rows.tmp",
    ] {
        std::fs::write(rows.join(name), [7; 9000]).unwrap();
    }
    strange.len() + 4
}

#[test]
fn many_rows_are_found_at_once_and_take_little_memory_each_and_junk_is_ignored() {
    let holder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (empty, root) = (holder.path().join("empty"), holder.path().join("kv"));
    make(&empty, 0).unwrap();
    make(&root, ROWS).unwrap();
    assert_eq!(add_junk(&root), 10);
    let before = ALLOCATOR.live_bytes();
    let tier = open(&empty);
    let alone = ALLOCATOR.live_bytes() - before;
    tier.close(Duration::from_secs(10)).unwrap();
    drop(tier);

    let before = ALLOCATOR.live_bytes();
    let begun = SystemClock.now();
    let tier = open(&root);
    let opened = SystemClock.now() - begun;
    let taken = ALLOCATOR.live_bytes() - before;
    let first = tier.lookup(&[key(ROWS / 2).unwrap()]).unwrap();
    let answered = SystemClock.now() - begun;
    assert_eq!(first, [Some(true)]);
    let rows = usize::try_from(ROWS).unwrap();
    let each = taken.saturating_sub(alone) / rows;
    println!("opened in {opened:?}, first answer after {answered:?}, {each} bytes a row");
    assert!(each <= ROW_MEMORY_MAX, "{each} bytes a row");

    let stats = tier.stats().unwrap();
    assert_eq!(stats["rows"].as_u64(), Some(ROWS));
    assert_eq!(stats["junk"].as_u64(), Some(9));
    assert_eq!(stats["leftovers"].as_u64(), Some(1));
    for first in (0..ROWS).step_by(10_000) {
        let keys: Vec<Key> = (first..first + 10_000).map(|n| key(n).unwrap()).collect();
        assert_eq!(tier.lookup(&keys).unwrap(), vec![Some(true); 10_000]);
    }
    assert_eq!(tier.lookup(&[key(ROWS).unwrap()]).unwrap(), [Some(false)]);
    tier.close(Duration::from_secs(10)).unwrap();
}
