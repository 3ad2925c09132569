//! Where a sandbox forbids the ring. Each test denies a system call to its own thread.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;

use engine_support::Root;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::uring::Uring;
use kvstrata_core::sys::clock::SystemClock;
use kvstrata_testkit::Completions;

/// From now on `call` fails with `errno` on this thread and those it starts.
fn deny(call: libc::c_long, errno: i32) {
    let step = |code: u32, jump_true, jump_false, operand| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: jump_true,
        jf: jump_false,
        k: operand,
    };
    let (load, compare, end) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let failure = libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap();
    let mut steps = [
        step(load, 0, 0, 0),
        step(compare, 0, 1, u32::try_from(call).unwrap()),
        step(end, 0, 0, failure),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: steps.as_mut_ptr(),
    };
    #[expect(unsafe_code, reason = "no crate here sets a filter")]
    // SAFETY: the program is valid while the call copies it; both calls concern this thread alone.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}

fn asked_for_by_name_it_is_an_error_and_auto_goes_on(call: libc::c_long, errno: i32) {
    deny(call, errno);
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
