//! One small scenario, killed before each change that it makes to files, one after the other.
//!
//! `KVSTRATA_TEST_CRASH_STEP` says how many changes lie between two points that are tried (7, where
//! it begins is drawn; 1 tries all).

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, and says what it did"
)]

mod chaos_support;
mod tier_support;

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chaos_support::ground::Generations;
use chaos_support::{allocated, everything};
use kvstrata_core::config::TierOptions;
use kvstrata_core::job::Outcome;
use kvstrata_core::key::Key;
use kvstrata_testkit::crash_point::kill_before;
use tier_support::{Harness, ROW_BYTES, key, keys};

const CAPACITY: u64 = 2 << 20;
const SLOTS: usize = 64;
const STEP: usize = 7;
/// Root, engine, number of the change.
const CHILD: &str = "KVSTRATA_TEST_CRASH_CHILD";
const CLOSE: Duration = Duration::from_secs(30);

fn options(root: &Path, engine: &str) -> TierOptions {
    TierOptions {
        io_backend: engine.to_owned(),
        ..tier_support::options(root, ROW_BYTES, CAPACITY)
    }
}

/// What is stored before the scenario begins: more than fits, so that everything evicts.
const BEFORE: core::ops::Range<u64> = 0..200;
/// Rows of one store of the scenario.
const STORED: u64 = 6;
/// First keys of the stores before and after the reset.
const EARLIER: [u64; 3] = [1100, 1200, 1300];
const LATER: u64 = 1400;

fn stored(first: u64) -> Vec<Key> {
    (first..first + STORED)
        .map(|number| key(number, if number % 2 == 0 { 0 } else { 7 }))
        .collect()
}

fn say(what: &str) {
    println!("did: {what}");
    std::io::stdout().flush().unwrap();
}

/// Not a test of its own: the process that is killed.
#[test]
fn a_child_does_nothing_unless_it_is_told_to() {
    let Ok(arguments) = std::env::var(CHILD) else {
        return;
    };
    let mut arguments = arguments.split('|');
    let mut argument = || arguments.next().unwrap();
    let (root, engine, change) = (argument(), argument(), argument());
    let changes = kill_before(change.parse().unwrap()).unwrap();
    let mut harness = Harness::open(options(Path::new(root), engine), SLOTS);
    say("open");
    for first in EARLIER {
        assert_eq!(harness.store(&stored(first)), [Outcome::Ok; 6]);
        say(&format!("store {first}"));
        assert_eq!(harness.load(&stored(first)[1..4]), [Outcome::Ok; 3]);
        harness.tier.remove(&stored(first)[5..]).unwrap();
    }
    say("begin reset");
    assert!(harness.tier.reset().unwrap());
    say("reset");
    assert_eq!(harness.store(&stored(LATER)), [Outcome::Ok; 6]);
    say(&format!("store {LATER}"));
    harness.tier.close(CLOSE).unwrap();
    say("close");
    println!("changes: {}", changes.load(Ordering::SeqCst));
}

struct Life {
    did: Vec<String>,
    changes: Option<u64>,
}

fn live(root: &Path, engine: &str, change: u64) -> Life {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_child_does_nothing_unless_it_is_told_to"])
        .arg("--nocapture")
        .env(CHILD, format!("{}|{engine}|{change}", root.display()))
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let killed = output.status.signal() == Some(libc::SIGKILL);
    let whole = killed || output.status.success();
    let heard = String::from_utf8_lossy(&output.stderr);
    assert!(whole, "{change}: {}: {said}{heard}", output.status);
    let after = |word: &str| {
        let said = said.lines().filter_map(|line| line.split_once(word));
        said.map(|(_, what)| what.to_owned()).collect::<Vec<_>>()
    };
    Life {
        did: after("did: "),
        changes: after("changes: ")
            .first()
            .map(|count| count.parse().unwrap()),
    }
}

/// Looks at what a life left behind, then goes on with it.
fn check(root: &Path, engine: &str, life: &Life, generations: &mut Generations) {
    generations.look(root).unwrap();
    assert!(allocated(root) <= CAPACITY);
    let mut harness = Harness::open(options(root, engine), SLOTS);
    assert_eq!(harness.stat("used_bytes"), allocated(root));
    let unfinished: Vec<_> = everything(root)
        .into_iter()
        .filter(|path| path.extension() == Some("tmp".as_ref()))
        .collect();
    assert_eq!(unfinished, Vec::<std::path::PathBuf>::new());
    let did = |what: &str| life.did.iter().any(|did| did == what);
    let (resetting, reset) = (did("begin reset"), did("reset"));
    let mut old: Vec<Key> = keys(BEFORE);
    old.extend(EARLIER.into_iter().flat_map(stored));
    let found = harness.found(&old);
    assert!(!reset || !found.contains(&true), "a reset was undone");
    if let Some(last) = EARLIER
        .into_iter()
        .rfind(|first| did(&format!("store {first}")))
    {
        let kept = harness.found(&stored(last)[..5]);
        assert!(
            resetting || kept == [true; 5],
            "stored rows are gone: {kept:?}"
        );
    }
    if did(&format!("store {LATER}")) {
        assert_eq!(harness.found(&stored(LATER)), [true; 6]);
    }
    let listed: Vec<Key> = old
        .iter()
        .zip(found)
        .filter_map(|(key, found)| found.then_some(*key))
        .collect();
    for some in listed.chunks(SLOTS) {
        assert_eq!(harness.load(some), vec![Outcome::Ok; some.len()]);
    }
    assert_eq!(
        (harness.stat("corrupt_rows"), harness.stat("torn_rows")),
        (0, 0)
    );
    assert_eq!(harness.stat("junk"), 0);
    let new = keys(1500..1510);
    assert_eq!(harness.store(&new), [Outcome::Ok; 10]);
    assert_eq!(harness.load(&new), [Outcome::Ok; 10]);
    assert_eq!(harness.stat("used_bytes"), allocated(root));
    harness.tier.close(CLOSE).unwrap();
    generations.look(root).unwrap();
}

fn copy(from: &Path, to: &Path) {
    let mut command = Command::new("cp");
    command.args(["-a", "--sparse=never"]).args([from, to]);
    assert!(command.status().unwrap().success());
}

fn try_points(engine: &str) {
    let holder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let before = holder.path().join("before");
    let mut harness = Harness::open(options(&before, engine), SLOTS);
    for some in keys(BEFORE).chunks(8) {
        assert_eq!(harness.store(some), [Outcome::Ok; 8]);
    }
    assert!(harness.stat("evicted_rows") > 0);
    harness.tier.close(CLOSE).unwrap();
    let root = holder.path().join("kv");
    copy(&before, &root);
    let whole = live(&root, engine, u64::MAX);
    assert_eq!(whole.did.last().unwrap(), "close");
    let changes = whole.changes.unwrap();
    let step = std::env::var("KVSTRATA_TEST_CRASH_STEP").ok();
    let step = step.map_or(STEP, |step| step.parse().unwrap());
    let mut first = [0; 8];
    kvstrata_core::sys::fs::fill_random(&mut first).unwrap();
    let first = u64::from_le_bytes(first) % u64::try_from(step).unwrap();
    let mut lives = 0;
    for change in (first..changes).step_by(step) {
        std::fs::remove_dir_all(&root).unwrap();
        copy(&before, &root);
        let mut generations = Generations::default();
        generations.look(&root).unwrap();
        println!("{engine}, before change {change} of {changes}");
        let life = live(&root, engine, change);
        check(&root, engine, &life, &mut generations);
        lives += 1;
    }
    println!("{engine}: killed before {lives} of {changes} changes");
    assert!(lives > 3);
}

#[test]
fn killed_before_any_change_to_files_by_threads_a_tier_goes_on_as_if_nothing_were() {
    try_points("threads");
}

#[test]
fn killed_before_any_change_to_files_by_a_ring_a_tier_goes_on_as_if_nothing_were() {
    try_points("uring");
}
