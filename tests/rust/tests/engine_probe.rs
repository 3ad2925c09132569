//! What the probe finds and leaves behind.

mod engine_support;

use std::os::unix::fs::PermissionsExt;

use engine_support::Root;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::io::Alignment;
use kvstrata_core::io::probe::{is_trial_name, probe};
use kvstrata_core::sys::fs::Direct;

#[test]
fn a_probe_names_what_it_found_in_one_line_and_leaves_nothing_behind() {
    for root in [Root::disk(), Root::memory()] {
        let found = probe(&root.directory, "auto").unwrap();
        let line = found.to_string();
        let begin = format!("{} on {}: ", found.io_backend, found.file_system);
        assert!(line.starts_with(&begin), "{line}");
        assert!(
            line.contains(found.io_mode()) && !line.contains('\n'),
            "{line}"
        );
        assert!(found.slot_align().is_power_of_two() && found.slot_align() <= 4096);
        assert_eq!(root.directory.entries().unwrap(), []);
        assert!(found.locks);
        let map = found.to_map();
        assert_eq!(map["slot_align"], found.slot_align());
        assert_eq!(
            (&map["io_backend"], &map["io_mode"]),
            (&found.io_backend.into(), &found.io_mode().into())
        );
        assert_eq!(found.summary(), line);
    }
}

#[test]
fn auto_takes_the_ring_on_local_disks_and_threads_in_memory_and_says_why() {
    let disk = probe(&Root::disk().directory, "auto").unwrap();
    let is_local = ["ext4", "xfs", "btrfs", "f2fs"].contains(&disk.file_system);
    let works = probe(&Root::disk().directory, "uring").is_ok();
    let expected = if is_local && works {
        "uring"
    } else {
        "threads"
    };
    assert_eq!(disk.io_backend, expected, "{disk}");
    assert_eq!(disk.remarks.is_empty(), expected == "uring", "{disk}");
    let memory = probe(&Root::memory().directory, "auto").unwrap();
    assert_eq!(memory.io_backend, "threads");
    let said = "io_uring is not taken on tmpfs unless asked for";
    assert_eq!(memory.remarks, [said]);
    let named = probe(&Root::memory().directory, "threads").unwrap();
    assert!(named.remarks.is_empty(), "{named}");
}

#[test]
fn in_memory_there_is_no_cache_to_go_round() {
    let found = probe(&Root::memory().directory, "threads").unwrap();
    assert_eq!((found.file_system, found.direct), ("tmpfs", Direct::No));
    assert_eq!(
        (found.io_mode(), found.alignment),
        ("buffered", Alignment::NONE)
    );
    assert!(found.fallocate && !found.may_hang);
}

#[test]
fn an_engine_that_is_not_known_is_refused_by_name() {
    for name in ["ring", "", "THREADS"] {
        let error = probe(&Root::memory().directory, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
    }
}

#[test]
fn a_ring_that_is_asked_for_is_tried_and_taken_on_disk_and_in_memory() {
    for root in [Root::disk(), Root::memory()] {
        let found = probe(&root.directory, "uring").unwrap();
        assert_eq!(found.io_backend, "uring");
        assert!(found.to_string().starts_with("uring on "), "{found}");
        assert_eq!(root.directory.entries().unwrap(), []);
    }
}

#[test]
fn a_root_that_takes_no_files_is_refused_by_its_path() {
    let root = Root::disk();
    let as_root = rustix::process::geteuid().is_root();
    let locked = std::fs::Permissions::from_mode(0o500);
    #[expect(clippy::disallowed_methods, reason = "the test breaks its own root")]
    std::fs::set_permissions(root.path(), locked).unwrap();
    let result = probe(&root.directory, "auto");
    if as_root {
        // The superuser may write anywhere.
        assert!(result.is_ok());
    } else {
        let error = result.unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&root.path().display().to_string()),
            "{error}"
        );
    }
}

#[test]
fn only_the_exact_names_of_trials_are_ours() {
    for name in [
        "probe.0123456789abcdef.tmp",
        "probe.0123456789abcdef.renamed.tmp",
    ] {
        assert!(is_trial_name(name), "{name}");
    }
    for name in [
        "probe.notes.tmp",
        "probe.0123456789abcdef",
        "probe.0123456789ABCDEF.tmp",
        "probe.0123456789abcdef.renamed.renamed.tmp",
        "my.probe.0123456789abcdef.tmp",
        "probe.tmp",
    ] {
        assert!(!is_trial_name(name), "{name}");
    }
}
