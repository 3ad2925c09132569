//! Kernels that stumble under both engines: no byte is wrong, and no row is lost to what passes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;
use std::time::Duration;

use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::buffer::Arena;
use kvstrata_core::io::alter::Alter;
use kvstrata_core::io::{DataFile, Direction, Engine, Failure, OperationId};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::Completions;
use kvstrata_testkit::kernel::{CallFault, every, first, out_of_order};
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::payload::payload;

const READ: Direction = Direction::Read;
const WRITE: Direction = Direction::Write;
const ROW: usize = 16384;

struct Bench {
    kind: Kind,
    engine: Arc<dyn Engine>,
    completions: Completions,
    file: Arc<DataFile>,
    arena: Arc<Arena>,
    _root: Root,
}

/// Both engines over kernels of this make.
fn benches(kernel: impl Fn() -> Alter) -> Vec<Bench> {
    Kind::ALL.map(|kind| {
        let root = Root::disk();
        let completions = Completions::default();
        Bench {
            kind,
            engine: kind.start_over(Some(kernel()), &root, Direct::Yes, completions.sink()),
            completions,
            file: root.file("rows", 8 << 20),
            arena: leaked_arena(600 * ROW, 0).unwrap(),
            _root: root,
        }
    })
}

impl Bench {
    fn row(&self, id: u64, direction: Direction, slot: usize) -> kvstrata_core::io::Operation {
        let at = id % 300 * u64::try_from(ROW).unwrap();
        let segments = vec![segment(&self.arena, slot * ROW, ROW)];
        operation(id, direction, &self.file, at, segments)
    }

    /// Writes 300 rows, reads them to other slots and compares.
    fn round_trip(&self) {
        for row in 0..300 {
            let bytes = payload(&row.to_string().into_bytes(), ROW);
            assert!(self.arena.copy_in(row * ROW, &bytes));
        }
        for (base, direction) in [(0, WRITE), (300, READ)] {
            let rows = (0..300_usize).map(|row| {
                let id = u64::try_from(base + row).unwrap();
                self.row(id, direction, base + row)
            });
            self.engine.submit(rows.collect());
            let done = self.completions.wait(300, SOON);
            assert_eq!(done.len(), 300, "{:?}", self.kind);
            for one in &done {
                assert_eq!(one.result, Ok(()), "{:?} {:?}", self.kind, one.operation.id);
            }
        }
        for row in 0..300 {
            let bytes = self.arena.bytes((300 + row) * ROW, ROW).unwrap();
            let expected = payload(&row.to_string().into_bytes(), ROW);
            assert!(bytes == expected, "{:?}: row {row}", self.kind);
        }
    }

    fn one(&self, id: u64, direction: Direction) -> Result<(), Failure> {
        self.engine.submit(vec![self.row(id, direction, 0)]);
        self.completions.wait(1, SOON).remove(0).result
    }
}

#[test]
fn every_third_call_interrupted_or_put_off_costs_no_row() {
    for errno in [libc::EINTR, libc::EAGAIN] {
        for bench in benches(|| every(3, CallFault::Errno(errno))) {
            bench.round_trip();
            let retried = bench.engine.counters().retried_calls;
            // 600 operations that succeed on average after half a failure.
            assert!((280..=320).contains(&retried), "{:?} {retried}", bench.kind);
            assert!(bench.engine.shutdown(SOON));
        }
    }
}

#[test]
fn every_third_call_cut_short_costs_no_row() {
    for bytes in [512, 4096, 100, 4097] {
        for bench in benches(|| every(3, CallFault::Short(bytes))) {
            bench.round_trip();
            let resumed = bench.engine.counters().resumed_transfers;
            assert!(resumed >= 200, "{:?} {resumed}", bench.kind);
            assert!(bench.engine.shutdown(SOON));
        }
    }
}

#[test]
fn answers_late_and_out_of_order_go_to_the_rows_they_are_for() {
    for bench in benches(out_of_order) {
        bench.round_trip();
        assert!(bench.engine.shutdown(SOON));
    }
}

#[test]
fn what_does_not_pass_fails_its_row_once_and_the_next_succeeds() {
    for errno in [libc::EIO, libc::ENOSPC, libc::ESTALE] {
        for bench in benches(|| first(1, CallFault::Errno(errno))) {
            assert_eq!(
                bench.one(1, WRITE),
                Err(Failure::Os(errno)),
                "{:?}",
                bench.kind
            );
            assert_eq!(bench.one(2, WRITE), Ok(()), "{:?}", bench.kind);
            assert!(bench.engine.shutdown(SOON));
        }
    }
}

#[test]
fn a_call_that_moves_nothing_ends_its_operation() {
    for bench in benches(|| every(1, CallFault::Short(0))) {
        assert_eq!(bench.one(1, READ), Err(Failure::Short), "{:?}", bench.kind);
        let failure = Failure::Os(libc::EIO);
        assert_eq!(bench.one(2, WRITE), Err(failure), "{:?}", bench.kind);
        assert!(bench.engine.shutdown(SOON));
    }
}

#[test]
fn a_call_that_is_always_interrupted_ends_after_65_attempts() {
    for bench in benches(|| every(1, CallFault::Errno(libc::EINTR))) {
        let failure = Failure::Os(libc::EINTR);
        assert_eq!(bench.one(1, WRITE), Err(failure), "{:?}", bench.kind);
        assert_eq!(bench.engine.counters().retried_calls, 64);
        assert!(bench.engine.shutdown(SOON));
    }
}

#[test]
fn a_refusal_of_direct_calls_downgrades_the_root_and_fails_no_row() {
    for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
        for bench in benches(|| first(1, CallFault::Errno(errno))) {
            assert!(bench.engine.requirements().slot_bytes() > 1);
            bench.round_trip();
            assert_eq!(
                bench.engine.requirements().slot_bytes(),
                1,
                "{:?}",
                bench.kind
            );
            assert!(bench.engine.counters().buffered_operations >= 1);
            assert!(bench.engine.shutdown(SOON));
        }
    }
}

#[test]
fn what_never_comes_back_keeps_its_slot_and_holds_up_nothing_else() {
    for bench in benches(|| first(1, CallFault::Never)) {
        let mut stuck = bench.row(0, READ, 0);
        stuck.deadline = SystemClock.now() + Duration::from_millis(100);
        bench.engine.submit(vec![stuck]);
        while !bench.engine.is_started(OperationId(0)) {
            SystemClock.sleep(Duration::from_millis(1));
        }
        SystemClock.sleep(Duration::from_millis(120));
        bench.engine.expire(SystemClock.now());
        bench
            .engine
            .submit((1..300).map(|id| bench.row(id, READ, 300)).collect());
        assert_eq!(
            bench.completions.wait(299, SOON).len(),
            299,
            "{:?}",
            bench.kind
        );
        assert!(bench.engine.is_started(OperationId(0)));
        assert_eq!(bench.engine.queue().stuck, 1);
        let begin = SystemClock.now();
        assert!(!bench.engine.shutdown(Duration::from_millis(300)));
        assert!(SystemClock.now() - begin < Duration::from_millis(1300));
        assert!(!bench.engine.shutdown(Duration::ZERO));
        assert!(bench.engine.is_started(OperationId(0)), "{:?}", bench.kind);
    }
}
