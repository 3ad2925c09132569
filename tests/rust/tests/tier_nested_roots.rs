//! A directory in a root is no root.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use tier_support::{Harness, keys, options};

const CAPACITY: u64 = 4 << 20;

fn refusal(path: &Path) -> String {
    let arena = leaked_arena(8192, 0).unwrap();
    let opened = Tier::open_shared(options(path, 4096, CAPACITY), arena, Seams::default());
    let error = opened.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    error.to_string()
}

/// All paths below one.
fn below(path: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(path).unwrap().flatten() {
        all.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            all.extend(below(&entry.path()));
        }
    }
    all.sort();
    all
}

#[test]
fn no_directory_in_a_root_is_a_root_and_the_root_is_named() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path().canonicalize().unwrap();
    let root = place.join("kv");
    let mut harness = Harness::open(options(&root, 4096, CAPACITY), 8);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    let namespace = below(&root)
        .into_iter()
        .find(|path| path.join("namespace.json").exists());
    let namespace = namespace.unwrap();
    symlink(&root, place.join("link")).unwrap();
    let linked = place.join("link").join(namespace.file_name().unwrap());
    // While an engine uses the root, and when none does.
    for _ in 0..2 {
        let before = below(&place);
        for inner in [
            namespace.clone(),
            namespace.join("rows"),
            namespace.join("rows/g0/"),
            root.join("new"),
            root.join("new/and/deeper"),
            linked.clone(),
        ] {
            let said = refusal(&inner);
            let expected = format!(
                "root {} lies in the root {} ",
                inner.display(),
                root.display()
            );
            assert!(said.starts_with(&expected), "{said}");
        }
        assert_eq!(below(&place), before, "nothing is made on the way");
        harness.tier.close(Duration::from_secs(10)).unwrap();
    }
    let roundabout = place.join("missing").join("../kv/new");
    assert!(refusal(&roundabout).contains(" lies in the root "));
    // Beside it, and around it, there is room for others.
    let beside = Harness::open(options(&place.join("kv2"), 4096, CAPACITY), 8);
    beside.tier.close(Duration::from_secs(10)).unwrap();
    let mut again = Harness::open(options(&root, 4096, CAPACITY), 8);
    assert_eq!(again.load(&keys(0..4)), [Outcome::Ok; 4]);
}

#[test]
fn a_namespace_that_was_taken_out_of_its_root_is_no_root_either() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("kv");
    let harness = Harness::open(options(&root, 4096, CAPACITY), 8);
    harness.tier.close(Duration::from_secs(10)).unwrap();
    let namespace = below(&root)
        .into_iter()
        .find(|path| path.join("namespace.json").exists());
    let moved = place.path().join("moved");
    std::fs::rename(namespace.unwrap(), &moved).unwrap();
    let said = refusal(&moved);
    assert!(
        said.contains(&format!(
            "{} is the directory of a namespace",
            moved.display()
        )),
        "{said}"
    );
}
