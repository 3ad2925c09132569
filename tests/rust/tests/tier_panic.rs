//! A tier whose engine ends by a panic.

mod tier_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvstrata_core::io::threads::{Bounce, Executed, Executor, FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::{Alignment, Direction, EngineCounters, Operation};
use kvstrata_core::job::Outcome;
use kvstrata_core::tier::Seams;
use tier_support::faulty::CAPACITY;
use tier_support::{Harness, ROW_BYTES, keys, options};

/// Moves rows until it is armed: then the next read panics.
#[derive(Debug)]
struct Panics {
    inner: FileExecutor,
    armed: Arc<AtomicBool>,
}

impl Executor for Panics {
    fn execute(&self, operation: &Operation, bounce: &mut Bounce) -> Executed {
        let panics = operation.direction == Direction::Read && self.armed.load(Ordering::SeqCst);
        assert!(!panics, "on purpose");
        self.inner.execute(operation, bounce)
    }

    fn requirements(&self) -> Alignment {
        self.inner.requirements()
    }

    fn counters(&self) -> EngineCounters {
        self.inner.counters()
    }
}

#[test]
fn a_panic_in_the_engine_leaves_a_tier_that_misses_and_says_so_once() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let own = Arc::clone(&armed);
    let seams = Seams {
        start_engine: Arc::new(move |capabilities, files, clock, sink| {
            let (direct, alignment) = (capabilities.direct, capabilities.alignment);
            let inner = FileExecutor::new(files, Arc::clone(&clock), direct, alignment);
            let armed = Arc::clone(&own);
            let executor = Arc::new(Panics { inner, armed });
            let threads =
                Threads::with_executor(executor, clock, ThreadCounts::of_process(false), sink)?;
            Ok(Arc::new(threads))
        }),
        ..Seams::default()
    };
    let mut harness = Harness::open_with(options(root.path(), ROW_BYTES, CAPACITY), 64, seams);
    let stored = keys(0..32);
    assert_eq!(harness.store(&stored), [Outcome::Ok; 32]);
    assert_eq!(harness.load(&stored), [Outcome::Ok; 32]);
    harness.tier.take_notices();
    armed.store(true, Ordering::SeqCst);
    assert_eq!(harness.load(&stored[..1]), [Outcome::IoError]);
    armed.store(false, Ordering::SeqCst);
    for _ in 0..20 {
        assert_eq!(harness.found(&stored), [false; 32]);
        assert_eq!(harness.load(&stored), [Outcome::Miss; 32]);
        assert_eq!(harness.store(&keys(100..104)), [Outcome::Dropped; 4]);
    }
    let stats = harness.tier.stats().unwrap();
    assert_eq!(stats.get("health").unwrap(), "poisoned");
    // It is no fault of the device, and no trial makes it good.
    assert_eq!(stats.get("circuit_openings").unwrap(), 0);
    let lines = harness.tier.take_notices();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines.iter().all(|line| line.text.contains("panic")));
    harness.tier.drain().unwrap();
    harness.tier.close(Duration::from_secs(10)).unwrap();
    // Nothing of it is left for the next to open the root.
    let mut next = Harness::open(options(root.path(), ROW_BYTES, CAPACITY), 64);
    assert_eq!(next.load(&stored[1..]), [Outcome::Ok; 31]);
}
