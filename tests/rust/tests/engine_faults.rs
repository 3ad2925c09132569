//! The faulty engine does what it is told, and keeps the contract while it does.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod engine_support;

use std::sync::Arc;
use std::time::Duration;

use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::io::{Completion, DataFile, Direction, Engine, Failure, Operation, OperationId};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::faulty::FaultPlan;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::{Completions, Fault, FaultyEngine};

struct Setup {
    engine: FaultyEngine,
    completions: Completions,
    file: Arc<DataFile>,
    arena: Arc<kvstrata_core::buffer::Arena>,
    _root: Root,
}

fn setup(kind: Kind, plan: FaultPlan) -> Setup {
    let root = Root::disk();
    let completions = Completions::default();
    let build = |sink| Ok::<_, ()>(kind.start(&root, Direct::Yes, sink));
    let engine = FaultyEngine::new(completions.sink(), plan, build).unwrap();
    let file = root.file("rows", 1 << 20);
    let arena = leaked_arena(1 << 20, 0).unwrap();
    assert!(arena.copy_in(0, &[7; 8192]));
    Setup {
        engine,
        completions,
        file,
        arena,
        _root: root,
    }
}

impl Setup {
    fn write(&self, id: u64) -> Operation {
        let segments = vec![segment(&self.arena, 0, 8192)];
        operation(id, Direction::Write, &self.file, id * 8192, segments)
    }

    fn content(&self, id: u64) -> Vec<u8> {
        let target = vec![segment(&self.arena, 16384, 8192)];
        let read = operation(1000 + id, Direction::Read, &self.file, id * 8192, target);
        self.engine.submit(vec![read]);
        assert_eq!(self.completions.wait(1, SOON)[0].result, Ok(()));
        self.arena.bytes(16384, 8192).unwrap().to_vec()
    }

    fn run(&self, id: u64) -> Completion {
        self.engine.submit(vec![self.write(id)]);
        self.completions.wait(1, SOON).remove(0)
    }
}

#[test]
fn failures_are_reported_with_nothing_all_or_a_part_done() {
    for kind in Kind::ALL {
        let setup = setup(
            kind,
            Box::new(|operation| match operation.id.0 {
                1 => Fault::Fail(Failure::Os(libc::ENOSPC)),
                2 => Fault::FailAfter(Failure::Os(libc::EIO)),
                3 => Fault::Tear(4096, Failure::Short),
                _ => Fault::None,
            }),
        );
        assert_eq!(setup.run(1).result, Err(Failure::Os(libc::ENOSPC)));
        assert_eq!(setup.run(2).result, Err(Failure::Os(libc::EIO)));
        let torn = setup.run(3);
        assert_eq!(torn.result, Err(Failure::Short));
        assert_eq!(
            torn.operation.bytes(),
            8192,
            "the operation comes back as it was"
        );
        assert_eq!(setup.content(1), [0; 8192]);
        assert_eq!(setup.content(2), [7; 8192]);
        assert_eq!(setup.content(3)[..4096], [7; 4096]);
        assert_eq!(setup.content(3)[4096..], [0; 4096]);
    }
}

#[test]
fn what_is_held_is_started_until_it_is_released() {
    for kind in Kind::ALL {
        let setup = setup(
            kind,
            Box::new(|operation| match operation.id.0 {
                1 => Fault::Hold,
                _ => Fault::None,
            }),
        );
        setup.engine.submit(vec![setup.write(1)]);
        assert_eq!(setup.run(2).operation.id, OperationId(2));
        assert!(setup.engine.is_started(OperationId(1)));
        setup
            .engine
            .expire(SystemClock.now() + Duration::from_hours(1));
        assert!(!setup.engine.shutdown(Duration::from_millis(10)));
        assert!(
            setup
                .completions
                .wait(1, Duration::from_millis(20))
                .is_empty()
        );
        setup.engine.release();
        assert_eq!(setup.completions.wait(1, SOON)[0].result, Ok(()));
        assert!(!setup.engine.is_started(OperationId(1)));
        assert!(setup.engine.shutdown(SOON));
    }
}

#[test]
fn what_is_delayed_comes_after_as_many_others() {
    for kind in Kind::ALL {
        let setup = setup(
            kind,
            Box::new(|operation| match operation.id.0 {
                1 => Fault::Delay(2),
                _ => Fault::None,
            }),
        );
        setup.engine.submit(vec![setup.write(1)]);
        while setup.engine.held() == 0 {
            SystemClock.sleep(Duration::from_millis(1));
        }
        let mut order = Vec::new();
        for id in [2, 3] {
            setup.engine.submit(vec![setup.write(id)]);
            order.extend(setup.completions.wait(1, SOON));
        }
        order.extend(setup.completions.wait(3 - order.len(), SOON));
        let order: Vec<u64> = order
            .iter()
            .map(|completion| completion.operation.id.0)
            .collect();
        assert_eq!(order, [2, 3, 1]);
    }
}

#[test]
fn what_is_stalled_was_never_started_and_ends_at_its_deadline() {
    for kind in Kind::ALL {
        let setup = setup(kind, Box::new(|_| Fault::Stall));
        let mut stalled = setup.write(1);
        stalled.deadline = SystemClock.now();
        setup.engine.submit(vec![stalled, setup.write(2)]);
        assert!(!setup.engine.is_started(OperationId(1)));
        setup.engine.expire(SystemClock.now());
        assert_eq!(
            setup.completions.wait(1, SOON)[0].result,
            Err(Failure::TimedOut)
        );
        assert!(setup.engine.shutdown(SOON));
        assert_eq!(
            setup.completions.wait(1, SOON)[0].result,
            Err(Failure::Closed)
        );
    }
}
