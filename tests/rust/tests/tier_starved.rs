//! Limits of space that leave no room for a row: said once, and shown while it is so.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::job::Outcome;
use kvstrata_core::notice::Level;
use kvstrata_core::tier::Seams;
use kvstrata_testkit::clock::ManualClock;
use kvstrata_testkit::sandbox::{Reach, deny};
use tier_support::mounts::Mount;
use tier_support::{Harness, key, keys, options, row_files};

const ROW_BYTES: usize = 4096;
const MIB: u64 = 1 << 20;

/// Total and available bytes of the file system of a path.
fn space_at(path: &Path) -> (u64, u64) {
    let found = rustix::fs::statvfs(path).unwrap();
    (
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
    )
}

fn warnings(harness: &Harness) -> Vec<String> {
    let lines = harness.tier.take_notices().into_iter();
    let bad = lines.filter(|line| line.level != Level::Info);
    bad.map(|line| line.text).collect()
}

fn word(harness: &Harness, name: &str) -> String {
    let stats = harness.tier.stats().unwrap();
    stats.get(name).unwrap().as_str().unwrap().to_owned()
}

fn with(root: &Path, capacity: Size, min_free: Size) -> TierOptions {
    let mut own = options(root, ROW_BYTES, 0);
    (own.capacity, own.min_free) = (capacity, min_free);
    own
}

fn stranger(mount: &Mount, name: &str, bytes: u64) {
    let bytes = vec![7; usize::try_from(bytes).unwrap()];
    std::fs::write(mount.path().join(name), bytes).unwrap();
}

#[test]
fn min_free_above_what_is_free_is_said_once_and_shown() {
    let place = tempfile::tempdir().unwrap();
    let (total, available) = space_at(place.path());
    // Others come and go meanwhile.
    let min_free = available + (total - available) / 2;
    let root = place.path().join("kv");
    let clock = Arc::new(ManualClock::default());
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    let own = with(&root, Size::Bytes(4 * MIB), Size::Bytes(min_free));
    let mut harness = Harness::open_with(own, 16, seams);
    let lines = warnings(&harness);
    let [line] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    for part in [
        format!(
            "min_free: {min_free} bytes are to stay free on the file system of {}",
            root.display()
        ),
        format!("of {total} bytes free"),
        "no row can be stored until there is more".to_owned(),
    ] {
        assert!(line.contains(&part), "{line}");
    }
    let shown = |harness: &Harness| (word(harness, "health"), word(harness, "space_limit"));
    assert_eq!(
        shown(&harness),
        ("no space".to_owned(), "min_free".to_owned())
    );
    for _ in 0..20 {
        assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
        // Longer than the pause between two lines about the same.
        clock.advance(Duration::from_secs(11));
    }
    assert_eq!(warnings(&harness), Vec::<String>::new());
    assert_eq!(
        shown(&harness),
        ("no space".to_owned(), "min_free".to_owned())
    );
    assert_eq!(harness.stat("errors"), 0);
}

#[test]
fn when_there_is_space_again_it_is_seen_without_a_store_and_said() {
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    stranger(&mount, "stranger", 20 * MIB);
    let clock = Arc::new(ManualClock::default());
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        ..Seams::default()
    };
    let own = with(&mount.root(), Size::Bytes(8 * MIB), Size::Bytes(16 * MIB));
    let mut harness = Harness::open_with(own, 2200, seams);
    assert_eq!(warnings(&harness).len(), 1);
    assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
    let look = || {
        clock.advance(Duration::from_secs(20));
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    };
    // Not by the look that follows a store.
    (0..20).for_each(|_| look());
    assert_eq!(word(&harness, "health"), "no space");
    std::fs::remove_file(mount.path().join("stranger")).unwrap();
    let begun = Instant::now();
    while word(&harness, "health") != "ok" {
        assert!(begun.elapsed() < Duration::from_secs(30), "not seen");
        look();
    }
    assert_eq!(word(&harness, "space_limit"), "none");
    let said = harness.tier.take_notices();
    let said: Vec<_> = said.iter().map(|line| line.text.as_str()).collect();
    assert_eq!(said, ["there is space for rows again"]);
    assert_eq!(harness.store(&keys(0..3)), [Outcome::Ok; 3]);
    assert_eq!(word(&harness, "space_limit"), "none");
    // A tier that is as full as it may be stores rows in the place of others: that is well.
    for round in 0..4 {
        let outcomes = harness.store(&keys(round * 800..round * 800 + 800));
        assert!(!outcomes.contains(&Outcome::NoSpace), "round {round}");
    }
    let shown = (word(&harness, "health"), word(&harness, "space_limit"));
    assert_eq!(shown, ("ok".to_owned(), "capacity".to_owned()));
    assert_eq!(warnings(&harness), Vec::<String>::new());
}

#[test]
fn a_disk_without_a_byte_is_told_from_bytes_that_are_kept_free() {
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    let own = with(&mount.root(), Size::Bytes(8 * MIB), Size::Bytes(0));
    let mut harness = Harness::open(own, 16);
    assert_eq!(warnings(&harness), Vec::<String>::new());
    let mut left = mount.available();
    for name in 0..4 {
        stranger(&mount, &name.to_string(), (left / 2 / 4096 + 1) * 4096);
        left = mount.available();
    }
    while mount.available() > 0 {
        stranger(
            &mount,
            &format!("{}", mount.available()),
            mount.available().min(MIB),
        );
    }
    assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
    let shown = (word(&harness, "health"), word(&harness, "space_limit"));
    assert_eq!(shown, ("no space".to_owned(), "disk".to_owned()));
    let lines = warnings(&harness);
    assert!(
        lines.len() == 1 && lines[0].contains(&format!("has 0 of {} bytes free", 32 * MIB)),
        "{lines:?}"
    );
}

#[test]
fn a_capacity_above_the_disk_is_said_once() {
    let place = tempfile::tempdir().unwrap();
    let (total, _) = space_at(place.path());
    for (capacity, min_free, told) in [
        (Size::Bytes(1 << 62), Size::Bytes(0), true),
        (Size::Bytes(total + 1), Size::Bytes(0), true),
        (Size::Bytes(total), Size::Bytes(0), false),
        (Size::Bytes(total), Size::Bytes(MIB), true),
        (Size::Percent(96.0), Size::Percent(5.0), true),
        (Size::Percent(90.0), Size::Percent(5.0), false),
    ] {
        let root = place.path().join("kv");
        let harness = Harness::open(with(&root, capacity, min_free), 16);
        let lines = warnings(&harness);
        let about: Vec<_> = lines
            .iter()
            .filter(|line| line.starts_with("capacity: "))
            .collect();
        assert_eq!(
            about.len(),
            usize::from(told),
            "{capacity:?} {min_free:?}: {lines:?}"
        );
        for line in about {
            assert!(line.contains(&format!("({total} less ")), "{line}");
        }
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn rows_of_an_earlier_run_that_go_at_open_are_told() {
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    let own =
        |capacity, min_free| with(&mount.root(), Size::Bytes(capacity), Size::Bytes(min_free));
    let mut harness = Harness::open(own(16 * MIB, 0), 1600);
    for round in 0..2 {
        harness.store(&keys(round * 1600..round * 1600 + 1600));
    }
    assert!(mount.available() < 24 * MIB, "{}", mount.available());
    harness.tier.close(Duration::from_secs(10)).unwrap();
    let harness = Harness::open(own(8 * MIB, 24 * MIB), 16);
    let lines = warnings(&harness);
    assert!(
        lines.len() == 1
            && lines[0].starts_with(&format!("min_free: {} bytes", 24 * MIB))
            && lines[0].ends_with("row files of earlier runs were removed"),
        "{lines:?}"
    );
    assert!(mount.available() >= 24 * MIB);
    assert_eq!(word(&harness, "health"), "ok");
}

#[test]
fn a_file_system_that_refuses_a_file_it_has_space_for_is_said_once() {
    let place = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::default());
    let start = Seams::default().start_engine;
    let seams = Seams {
        clock: Arc::<ManualClock>::clone(&clock),
        // After the probe of the root, and before the thread that makes files is started.
        start_engine: Arc::new(move |capabilities, cache, clock, sink| {
            deny(libc::SYS_fallocate, libc::EDQUOT, Reach::Thread).unwrap();
            start(capabilities, cache, clock, sink)
        }),
        ..Seams::default()
    };
    let own = with(
        &place.path().join("kv"),
        Size::Bytes(8 * MIB),
        Size::Bytes(0),
    );
    let mut harness = Harness::open_with(own, 16, seams);
    assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
    let lines = warnings(&harness);
    assert!(
        lines.len() == 1 && lines[0].contains("bytes free and makes no row file (Disk quota"),
        "{lines:?}"
    );
    for round in 0..20 {
        clock.advance(Duration::from_secs(20));
        harness.tier.remove(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let shown = (word(&harness, "health"), word(&harness, "space_limit"));
        assert_eq!(
            shown,
            ("no space".to_owned(), "refused".to_owned()),
            "look {round}"
        );
        if round % 4 == 0 {
            assert_eq!(harness.store(&keys(0..3)), [Outcome::NoSpace; 3]);
        }
    }
    let said = harness.tier.take_notices();
    assert!(said.is_empty(), "{said:?}");
    assert_eq!(harness.stat("errors"), 0);
}

#[test]
fn a_group_without_a_file_is_well_where_those_of_another_can_go() {
    const ROW: usize = 64 << 10;
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    let own = |capacity, min_free| {
        let mut own = options(&mount.root(), ROW, capacity);
        own.min_free = Size::Bytes(min_free);
        own
    };
    let mut harness = Harness::open(own(8 * MIB, 0), 64);
    for round in 0..3 {
        harness.store(&keys(round * 64..round * 64 + 64));
    }
    harness.tier.close(Duration::from_secs(10)).unwrap();
    // Less than a row is left.
    let min_free = mount.available() - 40_000;
    let mut harness = Harness::open(own(30 * MIB, min_free), 64);
    let lines = warnings(&harness);
    assert!(
        lines.iter().all(|line| line.starts_with("capacity: ")),
        "{lines:?}"
    );
    let shown = (word(&harness, "health"), word(&harness, "space_limit"));
    assert_eq!(shown, ("ok".to_owned(), "min_free".to_owned()));
    assert_eq!(harness.store(&[key(1, 7)]), [Outcome::Ok]);
}

#[test]
fn rows_of_an_earlier_run_that_go_without_making_room_are_told_too() {
    let Some(mount) = Mount::tmpfs(32 * MIB) else {
        return;
    };
    let own =
        |capacity, min_free| with(&mount.root(), Size::Bytes(capacity), Size::Bytes(min_free));
    let mut harness = Harness::open(own(8 * MIB, 0), 1600);
    assert!(harness.store(&keys(0..1600)).contains(&Outcome::Ok));
    harness.tier.close(Duration::from_secs(10)).unwrap();
    let files = row_files(&mount.root()).len();
    assert!(files > 1, "{files}");
    stranger(&mount, "stranger", 12 * MIB);
    let harness = Harness::open(own(8 * MIB, 24 * MIB), 16);
    assert_eq!(row_files(&mount.root()).len(), 0);
    let lines = warnings(&harness);
    let [line] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    assert!(
        line.starts_with(&format!("min_free: {} bytes", 24 * MIB))
            && line.ends_with(&format!(
                "bytes free: no row can be stored until there is more; {files} row files of \
                 earlier runs were removed"
            )),
        "{line}"
    );
    assert_eq!(word(&harness, "health"), "no space");
}
