//! Disks that are nearly full of other people's bytes and files. Needs root for its mounts; where
//! there is none it says so and tests nothing.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::as_conversions,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::clock::ManualClock;
use kvstrata_testkit::memory::leaked_arena;
use tier_support::mounts::Mount;
use tier_support::{Harness, assert_accounted, bytes_on_disk, key, keys, options, row_files};

const ROW_BYTES: usize = 4096;
const MIB: u64 = 1 << 20;

fn one_group(mount: &Mount, capacity: u64, min_free: u64) -> TierOptions {
    let mut own = options(&mount.root(), ROW_BYTES, capacity);
    own.row_bytes.retain(|group, _| group.0 == 0);
    own.min_free = Size::Bytes(min_free);
    own
}

/// A tier with a clock that the test moves: the tier looks at its limits when it is told to.
fn open(own: TierOptions) -> (Harness, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    (Harness::open_with(own, 600, seams), clock)
}

/// Lets time pass and waits until `condition` holds.
fn until(harness: &Harness, clock: &ManualClock, what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    clock.advance(Duration::from_secs(20));
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A stranger's file of so many bytes.
fn stranger(mount: &Mount, name: &str, bytes: u64) {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(mount.path().join(name))
        .unwrap();
    for _ in 0..bytes / MIB {
        file.write_all(&vec![7; 1 << 20]).unwrap();
    }
}

/// A stranger's file that takes all there is.
fn fill(mount: &Mount) {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(mount.path().join("everything"))
        .unwrap();
    let chunk = vec![7; 1 << 16];
    while file.write_all(&chunk).is_ok() {}
    while file.write_all(&[7; 512]).is_ok() {}
}

/// Stores rows `numbers`; says how many are there after it. Anything but `ok`, `present` and
/// `no_space` fails.
fn store(harness: &mut Harness, numbers: std::ops::Range<u64>) -> usize {
    let outcomes = harness.store(&keys(numbers));
    let expected = [Outcome::Ok, Outcome::Present, Outcome::NoSpace];
    assert!(
        outcomes.iter().all(|one| expected.contains(one)),
        "{outcomes:?}"
    );
    let there = outcomes.iter().filter(|one| **one != Outcome::NoSpace);
    there.count()
}

/// Loads every row that is said to be there; all of them must be whole.
fn loads_all_it_finds(harness: &mut Harness, numbers: std::ops::Range<u64>) -> usize {
    let own = keys(numbers);
    let found = harness.found(&own);
    let there: Vec<Key> = own
        .iter()
        .zip(found)
        .filter_map(|(key, found)| found.then_some(*key))
        .collect();
    for some in there.chunks(500) {
        assert_eq!(harness.load(some), vec![Outcome::Ok; some.len()]);
    }
    there.len()
}

fn inodes_free(mount: &Mount) -> u64 {
    mount.statistics().f_ffree
}

#[test]
fn few_inodes_are_left_to_others_and_stores_go_on() {
    let Some(mount) = Mount::ext4(64 * MIB, 2000) else {
        return;
    };
    // On a disk of 64 MiB files are of 2 MiB at most.
    let (mut harness, clock) = open(one_group(&mount, 1 << 30, 0));
    let kept = mount.statistics().f_files / 50;
    assert!((30..50).contains(&kept), "{kept}");
    assert_eq!(store(&mut harness, 0..500), 500);
    // Strangers leave fewer than the tier should: it gives files back.
    std::fs::create_dir(mount.path().join("strangers")).unwrap();
    let mut made = 0;
    let mut create = |mount: &Mount, leave: u64| {
        while inodes_free(mount) > leave {
            std::fs::write(mount.path().join(format!("strangers/{made}")), b"").unwrap();
            made += 1;
        }
    };
    for round in 1..5 {
        assert_eq!(store(&mut harness, round * 500..round * 500 + 500), 500);
    }
    let files = row_files(&mount.root()).len() as u64;
    assert!(files >= 3, "{files}");
    create(&mount, kept - 2);
    until(&harness, &clock, "inodes are not given back", || {
        inodes_free(&mount) >= kept
    });
    assert_eq!(row_files(&mount.root()).len() as u64, files - 2);
    // No file is made any more; the rows that are there are used again.
    for round in 5..10 {
        let there = store(&mut harness, round * 500..round * 500 + 500);
        assert!(there > 0, "round {round}");
        assert!(inodes_free(&mount) >= kept);
    }
    assert!(harness.stat("evicted_rows") > 500);
    assert!(loads_all_it_finds(&mut harness, 0..5000) > 300);
    assert_eq!(harness.stat("errors"), 0);
    let used = harness.stat("used_bytes");
    assert_accounted(&harness, &mount.root());
    // The strangers leave: there is room for files again.
    std::fs::remove_dir_all(mount.path().join("strangers")).unwrap();
    assert_eq!(store(&mut harness, 9000..9500), 500);
    assert_eq!(store(&mut harness, 9500..10_000), 500);
    assert!(harness.stat("used_bytes") > used);
}

/// What strangers that come and go do to a tier that keeps 8 MiB free.
fn strangers_come_and_go(mount: &Mount) {
    let (mut harness, clock) = open(one_group(mount, 1 << 30, 8 * MIB));
    for round in 0..20 {
        store(&mut harness, round * 500..round * 500 + 500);
        let left = mount.available();
        assert!(left >= 8 * MIB, "{left} bytes free after round {round}");
    }
    let full = harness.stat("used_bytes");
    assert!(full > 12 * MIB, "{full}");
    assert_accounted(&harness, &mount.root());
    let newest = harness.found(&keys(9990..10_000));
    assert_eq!(newest, [true; 10]);
    let mut before = full;
    for name in ["first", "second"] {
        stranger(mount, name, 6 * MIB);
        assert!(mount.available() < 8 * MIB);
        until(&harness, &clock, "space is not given back", || {
            mount.available() >= 8 * MIB
        });
        let used = harness.stat("used_bytes");
        // What was needed, and the rest of a file.
        assert!(
            before - used >= 5 * MIB && before - used <= 6 * MIB + 17 * MIB / 16,
            "{used}"
        );
        assert_accounted(&harness, &mount.root());
        before = used;
    }
    // The coldest went: what was stored last is there, and whole.
    assert_eq!(harness.found(&keys(9990..10_000)), [true; 10]);
    assert!(loads_all_it_finds(&mut harness, 0..10_000) > 100);
    // Everything is wanted by others: nothing is left, no call fails, and it all comes back.
    until(&harness, &clock, "not all is given back", || {
        fill(mount);
        clock.advance(Duration::from_secs(20));
        row_files(&mount.root()).is_empty()
    });
    assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
    assert_eq!(harness.load(&keys(9999..10_000)), [Outcome::Miss]);
    for name in ["first", "second", "everything"] {
        std::fs::remove_file(mount.path().join(name)).unwrap();
    }
    assert_eq!(store(&mut harness, 0..500), 500);
    assert_eq!(harness.load(&keys(0..500)), vec![Outcome::Ok; 500]);
    assert_eq!(harness.stat("errors"), 0);
    assert_accounted(&harness, &mount.root());
}

#[test]
fn on_ext4_the_coldest_files_go_while_strangers_fill_the_disk() {
    if let Some(mount) = Mount::ext4(32 * MIB, 2000) {
        strangers_come_and_go(&mount);
    }
}

#[test]
fn on_tmpfs_the_coldest_files_go_while_strangers_fill_the_disk() {
    if let Some(mount) = Mount::tmpfs(32 * MIB) {
        strangers_come_and_go(&mount);
    }
}

/// A disk that others fill to the last byte.
fn a_full_disk_passes(mount: &Mount, sparse: bool) {
    let (mut harness, clock) = open(one_group(mount, 1 << 30, 0));
    assert_eq!(store(&mut harness, 0..500), 500);
    fill(mount);
    assert!(mount.available() < 65536);
    let mut refused = 0;
    for round in 5..12 {
        refused += 100 - store(&mut harness, round * 100..round * 100 + 100);
        assert!(loads_all_it_finds(&mut harness, 0..round * 100 + 100) > 0);
    }
    // Rows whose space is held are used again; others find none.
    assert_eq!(refused > 0, sparse, "{refused} stores were refused");
    assert_eq!(harness.stat("retired_rows"), 0);
    std::fs::remove_file(mount.path().join("everything")).unwrap();
    clock.advance(Duration::from_secs(20));
    let again = (0..20).any(|_| store(&mut harness, 20_000..20_100) == 100);
    assert!(again, "stores did not recover");
    assert_eq!(harness.load(&keys(20_000..20_100)), [Outcome::Ok; 100]);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(harness);
    let (mut harness, _) = open(one_group(mount, 1 << 30, 0));
    assert_eq!(harness.load(&keys(20_000..20_100)), [Outcome::Ok; 100]);
    loads_all_it_finds(&mut harness, 0..2000);
    assert_eq!(harness.stat("corrupt_rows") + harness.stat("torn_rows"), 0);
    assert!(harness.stat("used_bytes") >= bytes_on_disk(&mount.root()));
}

#[test]
fn a_full_tmpfs_means_skipped_stores_and_working_loads_until_space_returns() {
    if let Some(mount) = Mount::tmpfs(32 * MIB) {
        a_full_disk_passes(&mount, false);
    }
}

#[test]
fn a_full_ext4_means_skipped_stores_and_working_loads_until_space_returns() {
    if let Some(mount) = Mount::ext4(32 * MIB, 200) {
        a_full_disk_passes(&mount, false);
    }
}

#[test]
fn a_full_disk_below_fuse_whose_files_are_sparse_passes_too() {
    let Some(mount) = Mount::tmpfs(32 * MIB).and_then(Mount::fuse) else {
        return;
    };
    a_full_disk_passes(&mount, true);
}

#[test]
fn sparse_files_are_not_promised_more_than_the_disk_has() {
    let Some(mount) = Mount::tmpfs(16 * MIB).and_then(Mount::fuse) else {
        return;
    };
    let (mut harness, _) = open(one_group(&mount, 1 << 30, 4 * MIB));
    assert_eq!(harness.tier.capabilities().unwrap()["fallocate"], false);
    let mut outcomes = Vec::new();
    for round in 0..10 {
        outcomes.extend(harness.store(&keys(round * 500..round * 500 + 500)));
        let left = mount.available();
        assert!(left >= 4 * MIB, "{left} after round {round}");
    }
    // Nothing ran out of space on its way: rows were used again instead.
    assert_eq!(outcomes, vec![Outcome::Ok; 5000]);
    assert!(harness.stat("evicted_rows") > 0);
    assert!(harness.stat("used_bytes") <= 12 * MIB);
    assert!(harness.stat("used_bytes") > 8 * MIB);
    assert_eq!(harness.stat("errors"), 0);
}

/// Sets or takes away the mark that lets no name in a directory come or go, also for root.
fn set_immutable(directory: &std::path::Path, mark: &str) {
    let status = std::process::Command::new("chattr")
        .arg(mark)
        .arg(directory)
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn a_file_that_cannot_be_removed_keeps_its_rows_and_its_place_in_the_count() {
    let Some(mount) = Mount::ext4(32 << 20, 500) else {
        return;
    };
    let root = mount.root();
    let mut harness = Harness::open(options(&root, ROW_BYTES, 2 * MIB), 64);
    let own = keys(0..400);
    for some in own.chunks(50) {
        harness.store(some);
    }
    let found = harness.found(&own);
    let files = row_files(&root);
    let used = harness.stat("used_bytes");
    let directory = files[0].parent().unwrap().to_path_buf();
    set_immutable(&directory, "+i");
    let others: Vec<Key> = (0..20).map(|number| key(number, 7)).collect();
    assert_eq!(harness.store(&others), [Outcome::NoSpace; 20]);
    assert_eq!(harness.found(&own), found);
    set_immutable(&directory, "-i");
    assert_eq!(row_files(&root), files);
    assert_eq!(harness.stat("used_bytes"), used);
    assert_eq!(harness.store(&others), [Outcome::Ok; 20]);
    assert_accounted(&harness, &root);
}

#[test]
fn files_that_cannot_be_removed_leave_their_turn_to_others() {
    let Some(mount) = Mount::ext4(32 * MIB, 2000) else {
        return;
    };
    let (mut harness, clock) = open(one_group(&mount, 1 << 30, 8 * MIB));
    for round in 0..10 {
        store(&mut harness, round * 500..round * 500 + 500);
    }
    let files = row_files(&mount.root());
    let kept: Vec<_> = files.iter().step_by(2).cloned().collect();
    assert!(files.len() >= 10, "{files:?}");
    for file in &kept {
        set_immutable(file, "+i");
    }
    stranger(&mount, "first", 6 * MIB);
    assert!(mount.available() < 8 * MIB);
    until(&harness, &clock, "space is not given back", || {
        mount.available() >= 8 * MIB
    });
    let left = row_files(&mount.root());
    for file in &kept {
        set_immutable(file, "-i");
        assert!(left.contains(file), "{left:?}");
    }
    assert!(loads_all_it_finds(&mut harness, 0..5000) > 100);
    assert_accounted(&harness, &mount.root());
}

#[test]
fn leaving_a_whole_file_system_free_is_refused_when_it_opens() {
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    for (min_free, refused) in [
        (Size::Percent(100.0), true),
        (Size::Bytes(32 * MIB), true),
        (Size::Bytes(1 << 50), true),
        (Size::Percent(99.0), false),
        (Size::Bytes(31 * MIB), false),
    ] {
        let mut own = one_group(&mount, 8 * MIB, 0);
        own.min_free = min_free;
        let arena = leaked_arena(64 * ROW_BYTES, 0).unwrap();
        match Tier::open_shared(own, arena, Seams::default()) {
            Err(error) => {
                assert!(refused, "{min_free:?}: {error}");
                assert!(error.to_string().contains("min_free: "), "{error}");
            }
            Ok(tier) => {
                assert!(!refused, "{min_free:?}");
                tier.close(Duration::from_secs(20)).unwrap();
            }
        }
    }
}
