//! The disk tier through its public API, on real files.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use tempfile::TempDir;
use tier_support::{Harness, ROW_BYTES, key, keys, options, row_files};

fn root() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

const CAPACITY: u64 = 16 << 20;

fn all(outcome: Outcome, count: usize) -> Vec<Outcome> {
    vec![outcome; count]
}

#[test]
fn rows_come_back_after_close_and_reopen_with_every_byte() {
    let root = root();
    let mut own: Vec<Key> = keys(0..100);
    own.extend((0..100).map(|number| key(number, 7)));
    {
        let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 200);
        assert_eq!(harness.found(&own), vec![false; 200]);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 200));
        assert_eq!(harness.load(&own), all(Outcome::Ok, 200));
        harness.tier.close(Duration::from_secs(10)).unwrap();
        harness.tier.close(Duration::from_secs(10)).unwrap();
        assert_eq!(harness.tier.poll().unwrap_err().kind(), ErrorKind::Closed);
    }
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 200);
    assert_eq!(harness.found(&own), vec![true; 200]);
    assert_eq!(harness.load(&own), all(Outcome::Ok, 200));
    assert_eq!(harness.store(&own[..3]), all(Outcome::Present, 3));
    assert_eq!(harness.load(&keys(1000..1003)), all(Outcome::Miss, 3));
}

#[test]
fn a_flipped_bit_in_a_row_is_corrupt_then_a_miss_until_stored_again() {
    let root = root();
    let own = keys(0..4);
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 8);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 4));
    let path = row_files(root.path()).pop().unwrap();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    // Rows start after superblock, change page and the row table's only page.
    let rows_at = {
        let stat = std::fs::metadata(&path).unwrap();
        let stride = 8192;
        let count = (stat.len() - 8192) / (stride + 128);
        8192 + (count * 128).div_ceil(4096) * 4096
    };
    for row in [0_u64, 1, 2] {
        let at = rows_at + row * 8192 + row * 2499;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
    let outcomes = harness.load(&own);
    assert_eq!(outcomes[..3], all(Outcome::Corrupt, 3));
    assert_eq!(
        outcomes[3],
        Outcome::Ok,
        "neighbours of bad rows are loaded"
    );
    assert_eq!(harness.found(&own), [false, false, false, true]);
    assert_eq!(harness.load(&own[..3]), all(Outcome::Miss, 3));
    assert_eq!(harness.stat("corrupt_rows"), 3);
    assert_eq!(harness.store(&own[..3]), all(Outcome::Ok, 3));
    assert_eq!(harness.load(&own), all(Outcome::Ok, 4));
}

#[test]
fn a_row_under_another_rows_entry_is_never_loaded() {
    let root = root();
    let own = keys(0..2);
    {
        let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 8);
        assert_eq!(harness.store(&own), all(Outcome::Ok, 2));
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let path = row_files(root.path()).pop().unwrap();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let (mut first, mut second) = ([0; 128], [0; 128]);
    file.read_exact_at(&mut first, 8192).unwrap();
    file.read_exact_at(&mut second, 8192 + 128).unwrap();
    file.write_all_at(&second, 8192).unwrap();
    file.write_all_at(&first, 8192 + 128).unwrap();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 8);
    assert_eq!(harness.load(&own), all(Outcome::Miss, 2));
    assert_eq!(harness.stat("junk"), 2);
}

#[test]
fn files_stay_within_capacity_and_the_tail_of_a_request_goes_first() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), 64);
    let first = keys(0..8);
    assert_eq!(harness.store(&first), all(Outcome::Ok, 8));
    let mut stored = 8_u64;
    while harness.stat("evicted_rows") == 0 {
        assert_eq!(harness.store(&keys([1000 + stored])), all(Outcome::Ok, 1));
        stored += 1;
        assert!(stored < 300);
    }
    assert_eq!(
        harness.found(&first),
        [true, true, true, true, true, true, true, false]
    );
    harness.store(&keys([5000, 5001]));
    assert_eq!(
        harness.found(&first),
        [true, true, true, true, true, false, false, false]
    );
    for round in 0..40 {
        harness.store(&keys(10_000 + round * 50..10_050 + round * 50));
        assert!(harness.stat("used_bytes") <= 1 << 20);
    }
    let on_disk: u64 = row_files(root.path())
        .iter()
        .map(|path| std::fs::metadata(path).unwrap().len())
        .sum();
    assert!(on_disk <= 1 << 20, "{on_disk}");
    assert_eq!(harness.stat("corrupt_rows"), 0);
}

#[test]
fn a_job_larger_than_the_tier_keeps_its_head() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), 600);
    let own = keys(0..600);
    let outcomes = harness.store(&own);
    let kept = outcomes
        .iter()
        .filter(|outcome| **outcome == Outcome::Ok)
        .count();
    assert!((40..52).contains(&kept), "{kept}");
    assert_eq!(outcomes[..kept], all(Outcome::Ok, kept));
    assert_eq!(outcomes[kept..], all(Outcome::NoSpace, 600 - kept));
    assert_eq!(harness.load(&own[..kept]), all(Outcome::Ok, kept));
}

#[test]
fn rows_that_a_store_finds_present_are_not_evicted_for_its_other_rows() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), 1300);
    let rows = harness.store(&keys(0..600));
    let rows = rows.iter().filter(|end| **end == Outcome::Ok).count();
    let rows = u64::try_from(rows).unwrap();
    // The coldest ones first, then so many others that all that can go has to, and more than are
    // planned at a time.
    let present = keys(0..8);
    let own = [present.clone(), keys(1000..1000 + rows + 520)].concat();
    let outcomes = harness.store(&own);
    assert_eq!(outcomes[..8], all(Outcome::Present, 8));
    assert_eq!(harness.found(&present), vec![true; 8]);
    assert_eq!(harness.load(&present), all(Outcome::Ok, 8));
    let stored = outcomes.iter().filter(|end| **end == Outcome::Ok).count();
    assert_eq!(u64::try_from(stored).unwrap(), rows - 8);
    // Later jobs may take them.
    assert_eq!(harness.store(&keys(5000..5008)), all(Outcome::Ok, 8));
}

#[test]
fn rows_of_a_store_do_not_go_with_their_files_for_its_rows_of_another_group() {
    let of = |numbers: std::ops::Range<u64>, group| {
        let own = numbers.map(|number| key(number, group));
        own.collect::<Vec<_>>()
    };
    // Present in every file, or stored by the same job and more than are planned at a time.
    let cases = [
        ("lru", true),
        ("lru", false),
        ("s3fifo", true),
        ("th", true),
    ];
    for (policy, is_present) in cases {
        let root = root();
        let mut own = options(root.path(), ROW_BYTES, 8 << 20);
        own.policy = policy.to_owned();
        let mut harness = Harness::open(own, 2000);
        let first = of(0..1100, 0);
        if is_present {
            harness.store(&first);
        }
        let others = of(0..800, 7);
        let own = [first.clone(), others.clone()].concat();
        let outcomes = harness.store(&own);
        let is_there = |end: &Outcome| matches!(end, Outcome::Ok | Outcome::Present);
        let there = outcomes.iter().filter(|end| is_there(end)).count();
        assert!(there > 400, "{there}");
        let all_found = harness.found(&own).into_iter().zip(&outcomes);
        let wrong = all_found.filter(|(found, end)| *found != is_there(end));
        assert_eq!(wrong.count(), 0, "{policy}, present: {is_present}");
        // Space moves as soon as that job is done.
        let after = of(5000..5020, 7);
        assert_eq!(harness.store(&after), all(Outcome::Ok, after.len()));
    }
}

#[test]
fn a_row_that_a_store_finds_being_stored_is_not_evicted_for_its_other_rows() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), 1700);
    for round in 0..20 {
        let awaited = keys([round]);
        let others = keys(10_000 * (round + 1)..10_000 * (round + 1) + 1600);
        let own = [awaited.clone(), others].concat();
        harness.fill(&own);
        let jobs = [&awaited, &own].map(|keys| {
            let job = harness.job();
            let offsets = harness.offsets(keys.len());
            harness.tier.store(job, keys, &offsets).unwrap();
            job
        });
        let results = harness.results(&jobs);
        assert_eq!(results[0].outcomes, [Outcome::Ok]);
        assert_eq!(results[1].outcomes[0], Outcome::Present);
        assert_eq!(harness.found(&awaited), [true], "round {round}");
    }
}

#[test]
fn a_job_of_more_present_keys_than_are_looked_at_at_a_time_finds_all_of_them() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), 4096, 64 << 20), 9000);
    let own = keys(0..9000);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 9000));
    let again = [own, keys(20_000..20_010)].concat();
    let outcomes = harness.store(&again[10..]);
    assert_eq!(outcomes[..8990], all(Outcome::Present, 8990));
    assert_eq!(outcomes[8990..], all(Outcome::Ok, 10));
    // What stayed meanwhile can be removed and go again.
    harness.tier.remove(&again[..100]).unwrap();
    assert_eq!(harness.found(&again[..101])[99..], [false, true]);
    assert_eq!(harness.store(&again[..100]), all(Outcome::Ok, 100));
}

#[test]
fn space_moves_to_the_group_that_needs_it() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 2 << 20), 100);
    let group_of = |numbers: std::ops::Range<u64>| numbers.map(|n| key(n, 7)).collect::<Vec<_>>();
    for round in 0..5 {
        harness.store(&group_of(round * 100..round * 100 + 100));
    }
    for round in 0..5 {
        let outcomes = harness.store(&keys(round * 100..round * 100 + 100));
        assert_eq!(outcomes, all(Outcome::Ok, 100), "round {round}");
    }
    assert_eq!(harness.found(&keys(400..500)), vec![true; 100]);
}

#[test]
fn a_reset_hides_everything_also_after_a_restart() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
        harness.store(&own);
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.found(&own), vec![false; 10]);
        assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
        assert_eq!(harness.store(&own[..4]), all(Outcome::Ok, 4));
        assert!(harness.tier.reset().unwrap());
        assert_eq!(harness.store(&own[8..]), all(Outcome::Ok, 2));
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    let mut expected = vec![false; 8];
    expected.extend([true, true]);
    assert_eq!(harness.found(&own), expected);
}

#[test]
fn a_lost_epoch_record_brings_nothing_back() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
        harness.store(&own[..5]);
        assert!(harness.tier.reset().unwrap());
        harness.store(&own[5..]);
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let namespace = row_files(root.path())[0]
        .ancestors()
        .nth(3)
        .unwrap()
        .to_path_buf();
    std::fs::remove_dir_all(namespace.join("epochs")).unwrap();
    let harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    assert_eq!(harness.found(&own), vec![false; 10]);
}

#[test]
fn removed_keys_are_hidden_at_once_and_stay_so_after_a_restart() {
    let root = root();
    let own = keys(0..10);
    {
        let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
        harness.store(&own);
        harness.tier.remove(&own[..5]).unwrap();
        harness.tier.remove(&keys(900..903)).unwrap();
        harness.tier.touch(&keys(900..903)).unwrap();
        assert_eq!(harness.found(&own[..5]), [false; 5]);
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    assert_eq!(harness.found(&own[..5]), [false; 5]);
    assert_eq!(harness.load(&own[5..]), all(Outcome::Ok, 5));
}

#[test]
fn a_vanished_file_is_a_miss_and_its_space_comes_back() {
    let root = root();
    let own = keys(0..10);
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    harness.store(&own);
    for path in row_files(root.path()) {
        std::fs::remove_file(path).unwrap();
    }
    assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
    assert_eq!(harness.found(&own), vec![false; 10]);
    assert_eq!(harness.stat("lost_files"), 1);
    assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
    assert_eq!(harness.load(&own), all(Outcome::Ok, 10));
}

#[test]
fn a_cut_file_is_a_miss_where_it_was_cut() {
    let root = root();
    let own = keys(0..10);
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    harness.store(&own);
    let path = row_files(root.path()).pop().unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(8192 + 4096)
        .unwrap();
    assert_eq!(harness.load(&own), all(Outcome::Miss, 10));
    assert_eq!(harness.store(&own), all(Outcome::Ok, 10));
    assert_eq!(harness.load(&own), all(Outcome::Ok, 10));
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(harness);
    let path = row_files(root.path()).pop().unwrap();
    let length = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(length - 1)
        .unwrap();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 16);
    assert_eq!(
        harness.load(&own),
        all(Outcome::Ok, 10),
        "whole rows survive the cut"
    );
}

#[test]
fn a_second_tier_on_a_root_is_refused_and_told_who_holds_it() {
    let root = root();
    let harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 4);
    let arena = leaked_arena(4 * ROW_BYTES, 0).unwrap();
    let second = Tier::open_shared(
        options(root.path(), ROW_BYTES, CAPACITY),
        arena,
        Seams::default(),
    );
    let error = second.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(
        error
            .to_string()
            .contains(&format!("process {}", std::process::id())),
        "{error}"
    );
    harness.tier.close(Duration::from_secs(10)).unwrap();
    drop(Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 4));
}

#[test]
fn wrong_arguments_name_themselves_and_begin_nothing() {
    let root = root();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 4);
    let two = keys(0..2);
    let row = u64::try_from(ROW_BYTES).unwrap();
    for (own, offsets, text) in [
        (&two[..], vec![0], "differ in length"),
        (&[key(1, 3)][..], vec![0], "keys[0]: group 3"),
        (&two[..], vec![0, 4 * row], "offsets[1]"),
        (&two[..], vec![0, u64::MAX], "offsets[1]"),
        (&[two[0], two[0]][..], vec![0, row], "keys[0] and keys[1]"),
        (&two[..], vec![row, row], "are the same"),
        (&two[..], vec![row, row + 1], "overlap"),
    ] {
        let error = harness.tier.store(1, own, &offsets).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Argument);
        assert!(error.to_string().contains(text), "{error}");
        assert!(
            harness
                .tier
                .load(1, own, &offsets)
                .unwrap_err()
                .to_string()
                .contains(text)
        );
    }
    harness.tier.load(9, &two, &[0, row]).unwrap();
    let error = harness.tier.store(9, &two, &[0, row]).unwrap_err();
    assert!(error.to_string().contains("job_id: 9"), "{error}");
    harness.result(9);
    harness.tier.store(9, &[], &[]).unwrap();
    assert!(harness.result(9).success());
    let job = harness.begin_store(&two);
    assert!(harness.result(job).success());
}

#[test]
fn an_unusable_root_that_is_not_required_misses_and_is_opened_later() {
    let root = root();
    let path = root.path().join("later");
    std::fs::write(&path, b"a file in the way").unwrap();
    let mut own = options(&path, ROW_BYTES, CAPACITY);
    own.required = false;
    let mut harness = Harness::open(own.clone(), 4);
    assert_eq!(harness.store(&keys(0..2)), all(Outcome::Dropped, 2));
    assert_eq!(harness.load(&keys(0..2)), all(Outcome::Miss, 2));
    assert_eq!(harness.tier.stats().unwrap()["health"], "unusable");
    std::fs::remove_file(&path).unwrap();
    let mut tries = 0;
    while harness.tier.stats().unwrap()["health"] != "ok" {
        tries += 1;
        assert!(tries < 200, "the root was not opened");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(harness.store(&keys(0..2)), all(Outcome::Ok, 2));
    own.row_bytes.clear();
    let arena = leaked_arena(8, 0).unwrap();
    let refused = Tier::open_shared(own, arena, Seams::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn other_namespaces_count_and_go_first() {
    let root = root();
    let mut other = options(root.path(), ROW_BYTES, 1 << 20);
    other.identity.insert("model".to_owned(), "other".into());
    {
        let mut harness = Harness::open(other, 64);
        while harness.stat("evicted_rows") == 0 {
            let from = harness.job() * 1000;
            harness.store(&keys(from..from + 20));
        }
    }
    let before = row_files(root.path()).len();
    let mut harness = Harness::open(options(root.path(), ROW_BYTES, 1 << 20), 64);
    let before = u64::try_from(before).unwrap();
    // The second namespace's own small files may cost the first one a row file at once.
    assert!((before - 2..=before).contains(&harness.stat("foreign_files")));
    assert_eq!(harness.store(&keys(0..40)), all(Outcome::Ok, 40));
    assert!(harness.stat("used_bytes") <= 1 << 20);
    assert!(harness.stat("foreign_files") < before - 2);
    assert_eq!(harness.stat("evicted_rows"), 0);
}
