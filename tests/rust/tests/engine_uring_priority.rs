//! Which operations the ring starts first when many wait.

mod engine_support;

use std::sync::{Arc, Mutex, mpsc};

use engine_support::{Root, SOON, operation, ring, segment};
use kvstrata_core::io::uring::Settings;
use kvstrata_core::io::{CompletionSink, Direction, Engine};
use kvstrata_core::sys::fs::Direct;
use kvstrata_testkit::Completions;
use kvstrata_testkit::memory::leaked_arena;

#[test]
fn a_read_overtakes_ten_thousand_writes_that_wait_and_writes_go_on_under_many_reads() {
    let root = Root::disk();
    let file = root.file("rows", 1 << 20);
    let arena = leaked_arena(4096, 0).unwrap();
    let completions = Completions::default();
    let (arrived, first) = mpsc::channel();
    let (go_on, gate) = mpsc::channel::<()>();
    let (collect, gate) = (completions.sink(), Mutex::new(gate));
    let sink: CompletionSink = Arc::new(move |completion| {
        if completion.operation.id.0 == 0 {
            // The ring's thread waits here, with nothing started, until all others wait for it.
            arrived.send(()).unwrap();
            gate.lock().unwrap().recv().unwrap();
        }
        collect(completion);
    });
    // One at a time: the order of completion is the order of start.
    let settings = Settings {
        depth: 1,
        ..Settings::default()
    };
    let engine = ring(&root, Direct::No, &settings, sink);
    let one = |id, direction| operation(id, direction, &file, 0, vec![segment(&arena, 0, 4096)]);
    engine.submit(vec![one(0, Direction::Write)]);
    first.recv().unwrap();
    engine.submit((1..10_001).map(|id| one(id, Direction::Write)).collect());
    engine.submit(vec![one(20_000, Direction::Read)]);
    engine.submit(
        (30_000..30_100)
            .map(|id| one(id, Direction::Read))
            .collect(),
    );
    go_on.send(()).unwrap();
    let done = completions.wait(10_102, SOON);
    let order: Vec<u64> = done.iter().map(|one| one.operation.id.0).collect();
    assert_eq!(order[..3], [0, 20_000, 30_000]);
    // While 101 reads wait: ten of them, then a write.
    let is_write = |id: &&u64| **id < 20_000;
    assert_eq!(order[1..111].iter().filter(is_write).count(), 10);
    assert_eq!(order[111..].iter().filter(is_write).count(), 10_000 - 10);
    assert!(engine.shutdown(SOON));
}
