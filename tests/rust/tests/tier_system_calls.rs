//! What lookups and loads ask of the kernel. Alone in its process, whose system calls it counts.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod tier_support;

use std::path::Path;
use std::process::{Command, Stdio};

use kvstrata_core::job::Outcome;
use kvstrata_testkit::sandbox::{count_instead, counted};
use tier_support::{Harness, ROW_BYTES, keys, options};

/// Who lists a directory to remove it must not be the process that cannot.
fn remove_when_this_process_ends(root: &Path) {
    let mut remover = Command::new("sh");
    remover
        .args(["-c", "read _; rm -rf \"$1\"", "sh"])
        .arg(root);
    let remover = remover.stdin(Stdio::piped()).spawn().unwrap();
    // Its standard input ends with this process.
    core::mem::forget(remover);
}

#[test]
fn lookups_loads_and_stores_never_list_a_directory() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))
        .unwrap()
        .keep();
    remove_when_this_process_ends(&root);
    let mut harness = Harness::open(options(&root, ROW_BYTES, 16 << 20), 100);
    assert_eq!(harness.store(&keys(0..100)), [Outcome::Ok; 100]);

    count_instead(libc::SYS_getdents64).unwrap();
    for round in 0..1000 {
        let found = harness.found(&keys([round % 100, 1000 + round]));
        assert_eq!(found, [true, false]);
    }
    assert_eq!(harness.load(&keys(0..100)), [Outcome::Ok; 100]);
    assert_eq!(harness.load(&keys(1000..1100)), [Outcome::Miss; 100]);
    assert_eq!(harness.store(&keys(200..300)), [Outcome::Ok; 100]);
    assert_eq!(counted(), 0);

    #[expect(unsafe_code, reason = "the one way to make a call without meaning it")]
    // SAFETY: no descriptor is -1, and the filter keeps the call from the kernel anyway.
    unsafe {
        libc::syscall(libc::SYS_getdents64, -1, 0, 0);
    }
    assert_eq!(counted(), 1, "a listing would have been counted");
}
