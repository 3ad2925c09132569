//! An engine without the tier, with the checksum that the tier would compute for each row.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvstrata_core::error::Result;
use kvstrata_core::io::file::FileCache;
use kvstrata_core::io::threads::{FileExecutor, ThreadCounts, Threads};
use kvstrata_core::io::uring::{self, Uring};
use kvstrata_core::io::{
    Channel, Completion, CompletionSink, DataFile, Direction, Engine, Memory, Operation,
    OperationId, Prelude, Segment, Started,
};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::Access;

use crate::check::Check;
use crate::count;
use crate::ground::{FILE_NAME, Ground, Move};
use crate::measure::Pass;

/// Bytes that the tier hands to its engine at a time.
const HAND_OVER_BYTES: usize = 1 << 20;
const PASS_TIME_MAX: Duration = Duration::from_mins(10);

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Blocking calls from so many threads.
    Threads(usize),
    /// A ring so deep.
    Ring(usize),
}

/// Moves rows with an engine: each is summed up before it is written, or after it was read, on the
/// engine's thread. None when a row was not moved.
///
/// # Errors
/// When the engine cannot be started.
pub fn run(
    ground: &Ground,
    kind: Kind,
    direction: Direction,
    row_bytes: usize,
    moves: &[Move],
) -> Result<Option<Pass>> {
    let check = Check::new(&ground.arena, row_bytes)?;
    let (countdown, end) = Countdown::new(moves.len());
    let sink = sink(countdown, &check, direction);
    let engine = start(ground, kind, sink)?;
    let mut operations = operations(ground, direction, &check, moves);
    let handed_over = (HAND_OVER_BYTES / row_bytes).max(1);
    let mut good = false;
    let pass = Pass::of(moves.len() * row_bytes, || {
        while !operations.is_empty() {
            let rest = operations.split_off(operations.len().min(handed_over));
            engine.submit(core::mem::replace(&mut operations, rest));
        }
        good = end.recv_timeout(PASS_TIME_MAX) == Ok(true);
    });
    Ok((good && engine.shutdown(PASS_TIME_MAX)).then_some(pass))
}

/// Operations that have not completed. The thread that waits is woken once, as a caller that polls
/// is not woken at all.
struct Countdown {
    left: AtomicUsize,
    failed: AtomicBool,
    end: Mutex<Sender<bool>>,
}

impl Countdown {
    fn new(count: usize) -> (Self, Receiver<bool>) {
        let (end, ended) = channel();
        let countdown = Self {
            left: AtomicUsize::new(count),
            failed: AtomicBool::new(false),
            end: Mutex::new(end),
        };
        (countdown, ended)
    }

    fn note(&self, good: bool) {
        if !good {
            self.failed.store(true, Ordering::Relaxed);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody waits any more: the pass took too long.
            let _ = end.send(!self.failed.load(Ordering::Relaxed));
        }
    }
}

fn sink(countdown: Countdown, check: &Check, direction: Direction) -> CompletionSink {
    let check = check.clone();
    Arc::new(move |completion: Completion| {
        if direction == Direction::Read {
            let slot = completion.operation.segments.first();
            check.row(slot.map_or(0, |part| part.offset));
        }
        countdown.note(completion.result.is_ok());
    })
}

fn start(ground: &Ground, kind: Kind, sink: CompletionSink) -> Result<Arc<dyn Engine>> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let files = Arc::new(FileCache::new(24));
    let (direct, alignment) = (ground.capabilities.direct, ground.capabilities.alignment);
    Ok(match kind {
        Kind::Threads(working) => {
            let executor = FileExecutor::new(files, Arc::clone(&clock), direct, alignment);
            let counts = ThreadCounts {
                working,
                replacements_max: 0,
            };
            Arc::new(Threads::with_executor(
                Arc::new(executor),
                clock,
                counts,
                sink,
            )?)
        }
        Kind::Ring(depth) => {
            let settings = uring::Settings {
                depth,
                ..uring::Settings::default()
            };
            let mode = (direct, alignment);
            Arc::new(Uring::with_settings(&settings, mode, files, clock, sink)?)
        }
    })
}

fn operations(
    ground: &Ground,
    direction: Direction,
    check: &Check,
    moves: &[Move],
) -> Vec<Operation> {
    let file = DataFile::new(Arc::clone(&ground.directory), FILE_NAME, Access::Write);
    let deadline = SystemClock.now() + PASS_TIME_MAX;
    let operation = |(id, (slot, offset)): (usize, &Move)| Operation {
        started: Started::default(),
        id: OperationId(count(id)),
        direction,
        file: Arc::clone(&file),
        channel: Channel::Rows,
        offset: *offset,
        segments: vec![Segment {
            memory: Memory::Arena(Arc::clone(&ground.arena)),
            offset: *slot,
            length: check.row_bytes(),
        }],
        deadline,
        prelude: match direction {
            Direction::Read => Prelude::NONE,
            Direction::Write => {
                let (check, slot) = (check.clone(), *slot);
                Prelude::new(move || check.row(slot))
            }
        },
    };
    moves.iter().enumerate().map(operation).collect()
}
