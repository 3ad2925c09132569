//! Engines with nothing to do. Alone in its process, whose threads it looks at.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::path::Path;
use std::time::Duration;

use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::io::Direction;
use kvstrata_core::io::threads::ThreadCounts;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;

/// Ticks of user and system time of the engine's threads, 10 ms each, and their number.
#[expect(
    clippy::disallowed_methods,
    reason = "what the kernel says of the threads"
)]
fn used() -> (u64, usize) {
    let (mut ticks, mut threads) = (0, 0);
    for task in Path::new("/proc/self/task").read_dir().unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
        let stat = stat.unwrap_or_default();
        let Some((name, rest)) = stat.split_once(") ") else {
            continue;
        };
        if name.contains("(kvstrata-") {
            let fields: Vec<&str> = rest.split(' ').collect();
            ticks += fields.get(11).unwrap().parse::<u64>().unwrap()
                + fields.get(12).unwrap().parse::<u64>().unwrap();
            threads += 1;
        }
    }
    (ticks, threads)
}

#[test]
fn an_idle_engine_uses_no_processor_time() {
    let working = ThreadCounts::of_process(false).working;
    // A quarter more for other files, and the one that refuses.
    let threads = working + working / 4 + 1;
    for (kind, threads) in [(Kind::Threads, threads), (Kind::Ring, 2)] {
        let root = Root::disk();
        let completions = Completions::default();
        let engine = kind.start(&root, Direct::Yes, completions.sink());
        let file = root.file("rows", 1 << 20);
        let arena = leaked_arena(4096, 0).unwrap();
        let read = |id| {
            let segments = vec![segment(&arena, 0, 4096)];
            operation(id, Direction::Read, &file, 0, segments)
        };
        engine.submit((0..100).map(read).collect());
        assert_eq!(completions.wait(100, SOON).len(), 100);
        // A thread has its name when it has run, and one that was joined may still be listed.
        let until = SystemClock.now() + SOON;
        while used().1 != threads {
            assert!(SystemClock.now() < until, "{kind:?}: {} threads", used().1);
            SystemClock.sleep(Duration::from_millis(10));
        }
        let before = used().0;
        SystemClock.sleep(Duration::from_secs(2));
        let ticks = used().0 - before;
        assert!(ticks <= 1, "{kind:?} used {ticks} ticks");
        assert!(engine.shutdown(SOON));
    }
}
