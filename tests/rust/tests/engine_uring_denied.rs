//! Where a sandbox forbids the ring. Each test denies a system call to its own thread.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;

use engine_support::Root;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::start;
use kvstrata_core::io::uring::Uring;
use kvstrata_core::sys::clock::SystemClock;
use kvstrata_testkit::Completions;
use kvstrata_testkit::sandbox::{Reach, deny};

fn asked_for_by_name_it_is_an_error_and_auto_goes_on(call: libc::c_long, errno: i32) {
    deny(call, errno, Reach::Thread).unwrap();
    let root = Root::disk();
    let error = probe(&root.directory, "uring").unwrap_err();
    assert_eq!(
        (error.kind(), error.errno()),
        (ErrorKind::Config, Some(errno))
    );
    assert!(error.to_string().contains("io_backend"), "{error}");
    assert_eq!(root.directory.entries().unwrap(), []);
    let found = probe(&root.directory, "auto").unwrap();
    assert_eq!(found.io_backend, "threads");
}

#[test]
fn a_set_up_that_is_not_permitted_is_told_apart_from_one_that_works() {
    asked_for_by_name_it_is_an_error_and_auto_goes_on(libc::SYS_io_uring_setup, libc::EPERM);
    let root = Root::disk();
    let found = probe(&root.directory, "threads").unwrap();
    let files = Arc::new(FileCache::new(24));
    let sink = Completions::default().sink();
    let error = Uring::start(&found, files, Arc::new(SystemClock), sink).unwrap_err();
    assert_eq!(
        (error.kind(), error.errno()),
        (ErrorKind::Unavailable, Some(libc::EPERM))
    );
}

#[test]
fn a_kernel_without_rings_is_told_apart_from_one_with() {
    asked_for_by_name_it_is_an_error_and_auto_goes_on(libc::SYS_io_uring_setup, libc::ENOSYS);
}

#[test]
fn a_ring_that_can_be_made_but_not_used_is_found_out() {
    asked_for_by_name_it_is_an_error_and_auto_goes_on(libc::SYS_io_uring_enter, libc::EPERM);
}

#[test]
fn a_set_up_that_is_refused_after_the_probe_starts_threads_unless_a_ring_was_asked_for() {
    let root = Root::disk();
    let (found, named) = (
        probe(&root.directory, "auto").unwrap(),
        probe(&root.directory, "uring").unwrap(),
    );
    assert_eq!((found.is_named, named.is_named), (false, true));
    deny(libc::SYS_io_uring_setup, libc::ENOMEM, Reach::Thread).unwrap();
    let try_start = |capabilities| {
        let files = Arc::new(FileCache::new(24));
        let sink = Completions::default().sink();
        start(capabilities, files, Arc::new(SystemClock), sink)
    };
    if found.io_backend == "uring" {
        assert_eq!(try_start(&found).unwrap().name(), "threads");
    }
    let error = try_start(&named).unwrap_err();
    assert_eq!(
        (error.kind(), error.errno()),
        (ErrorKind::Unavailable, Some(libc::ENOMEM))
    );
}
