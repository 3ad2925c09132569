//! Where the other tests run: `scripts/on_file_system.sh` says which file system it made.

#![expect(
    clippy::disallowed_methods,
    reason = "a script says what place it has made"
)]

mod engine_support;

use engine_support::Root;
use kvstrata_core::io::probe::probe;

#[test]
fn the_tests_are_on_the_file_system_that_was_made_for_them() {
    let Ok(expected) = std::env::var("KVSTRATA_TEST_FILE_SYSTEM") else {
        return;
    };
    let found = probe(&Root::disk().directory, "auto").unwrap();
    // ext2, ext3 and ext4 have one number.
    let name = if expected == "overlay" {
        "overlayfs"
    } else {
        &expected
    };
    assert_eq!(found.file_system, name);
    let expected_to_hang = matches!(name, "fuse");
    assert_eq!(found.may_hang, expected_to_hang);
    assert_eq!(found.fallocate, name != "fuse", "bindfs has no fallocate");
    if matches!(name, "tmpfs" | "fuse") {
        assert_eq!(found.io_backend, "threads");
    }
}
