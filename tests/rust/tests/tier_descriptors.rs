//! The tier with few descriptors and little locked memory. Alone in its process, whose limits it
//! lowers.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod tier_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvstrata_core::job::Outcome;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use rustix::process::{Resource, Rlimit, setrlimit};
use tier_support::{Harness, keys, options, row_files};

fn limit(resource: Resource, to: u64) {
    let limit = Rlimit {
        current: Some(to),
        maximum: Some(to),
    };
    setrlimit(resource, limit).unwrap();
}

fn open_descriptors() -> usize {
    let links = std::path::Path::new("/proc/self/fd").read_dir();
    links.map_or(usize::MAX, Iterator::count)
}

#[test]
fn ten_thousand_stores_and_loads_succeed_with_64_descriptors_and_64_kib_of_locked_memory() {
    limit(Resource::Nofile, 64);
    limit(Resource::Memlock, 65536);
    let stop = Arc::new(AtomicBool::new(false));
    let most = Arc::new(AtomicUsize::new(0));
    let watcher = {
        let (stop, most) = (Arc::clone(&stop), Arc::clone(&most));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                most.fetch_max(open_descriptors(), Ordering::Relaxed);
                SystemClock.sleep(Duration::from_millis(1));
            }
        })
    };
    for backend in ["threads", "uring"] {
        if backend == "uring" && tier_support::io_backend() == "auto" {
            continue;
        }
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut own = options(root.path(), 4096, 46 << 20);
        backend.clone_into(&mut own.io_backend);
        let mut harness = Harness::open(own, 200);
        for from in (0..10_000).step_by(200) {
            let some = keys(from..from + 200);
            assert_eq!(harness.store(&some), [Outcome::Ok; 200], "{backend}");
        }
        let files = row_files(root.path()).len();
        assert!(
            files > 48,
            "{backend}: as many files could be open at once: {files}"
        );
        // Twenty rows of each of ten distant places: every load reads several files.
        for from in (0..10_000).step_by(200) {
            let some = keys((0..200).map(|at| (from + at % 10 * 1000 + at / 10) % 10_000));
            assert_eq!(harness.load(&some), [Outcome::Ok; 200], "{backend}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    watcher.join().unwrap();
    let most = most.load(Ordering::Relaxed);
    assert!(most <= 48, "{most} descriptors were open");
    assert!(most > 10, "{most}: nobody counted");
}
