//! The tier where a sandbox denies `io_uring`. Each test denies a system call to its own thread and
//! so to those of the tiers it opens.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails where these fail"
)]

mod tier_support;

use std::sync::Arc;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::job::Outcome;
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::sandbox::{Reach, deny};
use tier_support::{Harness, ROW_BYTES, keys, options};

const CAPACITY: u64 = 16 << 20;

fn auto_takes_threads_and_the_ring_by_name_is_refused(call: libc::c_long, errno: i32) {
    deny(call, errno, Reach::Thread).unwrap();
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut forced = options(root.path(), ROW_BYTES, CAPACITY);
    "uring".clone_into(&mut forced.io_backend);
    let arena = leaked_arena(4 * ROW_BYTES, 0).unwrap();
    let error = Tier::open_shared(forced, Arc::clone(&arena), Seams::default()).unwrap_err();
    assert_eq!(
        (error.kind(), error.errno()),
        (ErrorKind::Config, Some(errno))
    );
    let text = error.to_string();
    assert!(
        text.contains("io_backend: \"uring\" does not work here"),
        "{text}"
    );

    let mut auto = options(root.path(), ROW_BYTES, CAPACITY);
    "auto".clone_into(&mut auto.io_backend);
    let mut harness = Harness::open(auto, 100);
    assert_eq!(
        harness.tier.capabilities().unwrap()["io_backend"],
        "threads"
    );
    assert_eq!(harness.store(&keys(0..100)), [Outcome::Ok; 100]);
    assert_eq!(harness.load(&keys(0..100)), [Outcome::Ok; 100]);
}

#[test]
fn where_rings_are_not_permitted_auto_takes_threads() {
    auto_takes_threads_and_the_ring_by_name_is_refused(libc::SYS_io_uring_setup, libc::EPERM);
}

#[test]
fn where_the_kernel_has_no_rings_auto_takes_threads() {
    auto_takes_threads_and_the_ring_by_name_is_refused(libc::SYS_io_uring_setup, libc::ENOSYS);
}

#[test]
fn where_a_ring_can_be_made_but_not_entered_auto_takes_threads() {
    auto_takes_threads_and_the_ring_by_name_is_refused(libc::SYS_io_uring_enter, libc::EPERM);
}
