//! Modes of what is created. One test, so that nothing else of its process sees its umask.

#![expect(
    clippy::disallowed_methods,
    reason = "modes are looked at from the outside"
)]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kvstrata_core::key::GroupId;
use kvstrata_core::namespace::{Epochs, Manifest, Namespace};
use kvstrata_core::sys::fs::{Access, Direct, Directory, ShareMode};
use rustix::fs::Mode;
use serde_json::{Map, Value};

fn assert_modes(path: &Path, directory_mode: u32, file_mode: u32) -> usize {
    let mode = std::fs::symlink_metadata(path)
        .unwrap()
        .permissions()
        .mode()
        & 0o7777;
    if !path.is_dir() {
        assert_eq!(mode, file_mode, "{} has {mode:o}", path.display());
        return 1;
    }
    assert_eq!(mode, directory_mode, "{} has {mode:o}", path.display());
    let below = std::fs::read_dir(path).unwrap();
    1 + below
        .map(|entry| assert_modes(&entry.unwrap().path(), directory_mode, file_mode))
        .sum::<usize>()
}

fn fill(root: &Path, share: ShareMode) {
    let identity = Map::from_iter([("model".to_owned(), Value::from("m"))]);
    let manifest = Manifest::new(identity, &BTreeMap::from([(GroupId(0), 4096)])).unwrap();
    let root = Directory::open_root(root, true, share).unwrap();
    let namespace = Namespace::open(&root, &manifest).unwrap();
    Epochs::open(namespace.directory()).unwrap();
    let rows = namespace.group_directory(GroupId(0)).unwrap();
    rows.create_new("0000000000000001.rows", Access::Write, Direct::No)
        .unwrap();
}

#[test]
fn what_is_created_has_exactly_its_mode_whatever_the_umask() {
    let place = tempfile::tempdir().unwrap();
    let before = rustix::process::umask(Mode::empty());
    for umask in [0o000, 0o022, 0o077, 0o177, 0o777] {
        rustix::process::umask(Mode::from_raw_mode(umask));
        for (share, directory, file) in [
            (ShareMode::Private, 0o700, 0o600),
            (ShareMode::Group, 0o2770, 0o660),
        ] {
            // Parents that are missing are made too.
            let parent = place.path().join(format!("{umask:o}-{directory:o}"));
            fill(&parent.join("root"), share);
            assert_eq!(assert_modes(&parent, directory, file), 9);
        }
    }
    rustix::process::umask(before);
}
