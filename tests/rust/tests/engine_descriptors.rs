//! Few descriptors suffice for many files. Alone in its process, whose limit it lowers.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod engine_support;

use std::sync::Arc;

use engine_support::{Kind, Root, SOON, operation, segment};
use kvstrata_core::io::Direction;
use kvstrata_core::sys::fs::{Access, Direct};
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;
use rustix::process::{Resource, Rlimit, setrlimit};

fn open_descriptors() -> usize {
    std::path::Path::new("/proc/self/fd")
        .read_dir()
        .unwrap()
        .count()
}

#[test]
fn ten_thousand_operations_on_300_files_succeed_with_64_descriptors() {
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(64),
            maximum: Some(64),
        },
    )
    .unwrap();
    for kind in Kind::ALL {
        few_suffice(kind);
    }
}

fn few_suffice(kind: Kind) {
    let root = Root::disk();
    let completions = Completions::default();
    let engine = kind.start(&root, Direct::Yes, completions.sink());
    let files: Vec<_> = (0..300)
        .map(|number| root.file(&format!("{number}"), 65536))
        .collect();
    let arena = leaked_arena(4096 * 64, 0).unwrap();
    let mut most = 0;
    for round in 0..10_u64 {
        let direction = if round % 2 == 0 {
            Direction::Write
        } else {
            Direction::Read
        };
        let operations = (0..1000_u64).map(|number| {
            let file = &files[usize::try_from(number * 7 % 300).unwrap()];
            let slot = usize::try_from(number % 64).unwrap() * 4096;
            let segments = vec![segment(&arena, slot, 4096)];
            operation(round * 1000 + number, direction, file, 4096, segments)
        });
        engine.submit(operations.collect());
        let mut arrived = Vec::new();
        while arrived.len() < 1000 {
            let more = completions.wait(1, SOON);
            assert!(!more.is_empty());
            arrived.extend(more);
            most = most.max(open_descriptors());
        }
        for completion in &arrived {
            assert_eq!(
                completion.result,
                Ok(()),
                "{:?}",
                completion.operation.file.name()
            );
        }
    }
    assert!(most <= 48, "{kind:?}: {most} descriptors were open");

    // With none left at all, operations wait and go on when there are some again.
    let mut hoard = Vec::new();
    while let Ok(file) = root.directory.open("0", Access::Read, Direct::No) {
        hoard.push(file);
    }
    let file = &files[299];
    file.close();
    engine.submit(vec![operation(
        1 << 20,
        Direction::Read,
        file,
        0,
        vec![segment(&arena, 0, 4096)],
    )]);
    let arrived = completions.wait(1, SOON);
    assert_eq!(arrived[0].result, Ok(()), "its own descriptors make room");
    drop(hoard);
    drop(Arc::clone(file));
    assert!(engine.shutdown(SOON));
    drop((engine, files, arrived));
    assert!(open_descriptors() < 20);
}
