//! How much of a row is copied because its memory or its length is not aligned.

mod engine_support;

use std::sync::Arc;

use engine_support::{Kind, Root, SOON, operation, result, segment};
use kvstrata_core::buffer::AlignedBuffer;
use kvstrata_core::io::{Direction, Memory, Segment};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;

const READ: Direction = Direction::Read;
const WRITE: Direction = Direction::Write;

#[test]
fn only_the_unaligned_tail_of_a_row_is_copied_however_long_the_row_is() {
    for kind in Kind::ALL {
        let root = Root::disk();
        let completions = Completions::default();
        let engine = kind.start(&root, Direct::Yes, completions.sink());
        let unit = engine.requirements().slot_bytes();
        let unit_bytes = u64::try_from(unit).unwrap();
        let pad = AlignedBuffer::zeroed(4096, 4096).unwrap();
        let pad = Memory::Buffer(Arc::new(pad));
        let file = root.file("rows", 32 << 20);
        let arena = leaked_arena(17 << 20, 0).unwrap();
        let rows = [512, 3_098_112, 16 << 20, 1000, 4096 + 511, 4097];
        for (id, length) in (0..).zip(rows) {
            let rest = usize::next_multiple_of(length, 4096) - length;
            let padding = Segment {
                memory: pad.clone(),
                offset: 4096 - rest,
                length: rest,
            };
            // Of the padding what shares the tail's last sector is copied too.
            let expected = if length % unit > 0 { unit_bytes } else { 0 };
            for direction in [WRITE, READ] {
                let before = engine.counters().bounced_bytes;
                let segments = vec![segment(&arena, 0, length), padding.clone()];
                let number = 2 * id + u64::from(direction == READ);
                let one = operation(number, direction, &file, 0, segments);
                assert_eq!(result(&*engine, &completions, one), Ok(()), "{length}");
                let bounced = engine.counters().bounced_bytes - before;
                assert_eq!(bounced, expected, "{kind:?} {length}");
            }
        }
        assert_eq!(engine.counters().buffered_operations, 0);
        assert!(engine.shutdown(SOON));
    }
}

#[test]
fn a_row_at_an_odd_address_is_copied_whole_and_one_in_place_not_at_all() {
    for kind in Kind::ALL {
        let root = Root::disk();
        let completions = Completions::default();
        let engine = kind.start(&root, Direct::Yes, completions.sink());
        let unit = engine.requirements().slot_bytes();
        let arena = leaked_arena(1 << 20, 0).unwrap();
        let file = root.file("rows", 1 << 20);
        for (id, (offset, bounced)) in [(unit, 0), (unit + 1, 65536)].into_iter().enumerate() {
            let id = u64::try_from(id).unwrap();
            let segments = vec![segment(&arena, offset, 65536)];
            let one = operation(id, WRITE, &file, 0, segments);
            assert_eq!(result(&*engine, &completions, one), Ok(()));
            assert_eq!(
                engine.counters().bounced_bytes,
                bounced,
                "{kind:?} {offset}"
            );
        }
        assert!(engine.shutdown(SOON));
    }
}
