//! What the ring costs a process. Alone in its process: it counts rings and lowers a limit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::path::Path;

use engine_support::{Root, SOON, operation, ring, segment};
use kvstrata_core::io::uring::Settings;
use kvstrata_core::io::{Direction, Engine};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Rings of this process.
fn rings() -> usize {
    let links = Path::new("/proc/self/fd").read_dir().unwrap();
    links
        .filter_map(|link| link.ok()?.path().read_link().ok())
        .filter(|target| target.to_str() == Some("anon_inode:[io_uring]"))
        .count()
}

#[test]
fn ten_thousand_operations_take_one_ring_and_little_locked_memory() {
    let little = Rlimit {
        current: Some(65536),
        maximum: Some(65536),
    };
    setrlimit(Resource::Memlock, little).unwrap();
    let root = Root::disk();
    let completions = Completions::default();
    let settings = Settings::default();
    let engine = ring(&root, Direct::Yes, &settings, completions.sink());
    let file = root.file("rows", 4 << 20);
    let arena = leaked_arena(4096 * 64, 0).unwrap();
    assert_eq!(rings(), 1);
    for round in 0..10_u64 {
        let operations = (0..1000_u64).map(|number| {
            let slot = usize::try_from(number % 64).unwrap() * 4096;
            let segments = vec![segment(&arena, slot, 4096)];
            let id = round * 1000 + number;
            operation(id, Direction::Write, &file, number * 4096, segments)
        });
        engine.submit(operations.collect());
        let done = completions.wait(1000, SOON);
        assert_eq!(done.len(), 1000);
        assert!(done.iter().all(|one| one.result.is_ok()));
        assert_eq!(rings(), 1);
    }
    assert!(engine.shutdown(SOON));
    assert_eq!(rings(), 0);
}
