//! Rows on their way to the engine: each operation becomes a flight.

use crate::io::{Channel, Direction, Memory, Operation, Prelude, Segment, Started};
use crate::job::{JobKind, Outcome};
use crate::metrics::count;
use crate::sys::sync::Arc;
use crate::tier::disk::DiskTier;
use crate::tier::load_buffers::{LoadBuffer, WaitingRun};
use crate::tier::plan;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};
use crate::tier::sums::Sums;

/// Where the rows of an operation are in memory.
enum Target {
    /// In their slots.
    Slots,
    /// In a buffer of the tier's own.
    Buffer(LoadBuffer),
    /// A buffer will be free later.
    Later,
    /// No buffer will be free in time.
    Nowhere,
}

impl DiskTier {
    /// Makes one operation per run of neighbouring rows and enters each as a flight. A load that
    /// needs a buffer waits for one, or ends as a miss where none can be expected.
    pub(super) fn launch(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        runs: Vec<Vec<FlightRow>>,
        epoch: u32,
    ) -> Vec<Operation> {
        let mut operations = Vec::with_capacity(runs.len());
        for rows in runs {
            let run = WaitingRun {
                request: Arc::clone(request),
                rows,
                epoch,
            };
            let queued = state.buffers.as_ref().is_some_and(|buffers| {
                request.kind == JobKind::Load && !buffers.waiting.is_empty()
            });
            let target = if queued {
                Target::Later
            } else {
                target(state, &run)
            };
            match (target, &mut state.buffers) {
                (Target::Later, Some(buffers)) => buffers.waiting.push_back(run),
                (target, _) => operations.extend(self.launch_run(state, run, target)),
            }
        }
        operations
    }

    /// Makes the operations of loads that waited for a buffer, as far as buffers go.
    pub(super) fn launch_waiting(&self, state: &mut State) -> Vec<Operation> {
        let mut operations = Vec::new();
        while let Some(run) = state
            .buffers
            .as_mut()
            .and_then(|buffers| buffers.waiting.pop_front())
        {
            match (target(state, &run), &mut state.buffers) {
                (Target::Later, Some(buffers)) => {
                    buffers.waiting.push_front(run);
                    break;
                }
                (target, _) => operations.extend(self.launch_run(state, run, target)),
            }
        }
        operations
    }

    fn launch_run(&self, state: &mut State, run: WaitingRun, target: Target) -> Option<Operation> {
        let nowhere = matches!(target, Target::Nowhere | Target::Later);
        let buffer = match target {
            Target::Buffer(buffer) => Some(buffer),
            Target::Slots | Target::Later | Target::Nowhere => None,
        };
        let sums = Sums::default();
        let operation = if nowhere {
            None
        } else {
            self.operation(state, &run, buffer.as_ref(), &sums)
        };
        let WaitingRun {
            request,
            rows,
            epoch,
        } = run;
        let flight = Flight {
            request,
            rows,
            epoch,
            submitted: self.around.clock.now(),
            sums,
            buffer,
            abandoned: false,
            landing: false,
        };
        let Some(operation) = operation else {
            self.end_unlaunched(state, flight, nowhere);
            return None;
        };
        if operation.direction == Direction::Write {
            let bytes = operation.bytes();
            self.around.metrics.bytes_written.add(bytes);
            state.store_bytes_in_engine = state.store_bytes_in_engine.saturating_add(bytes);
        }
        state.flights.insert(operation.id, flight);
        Some(operation)
    }

    /// Ends what could not be launched: no buffer is free (`nowhere`), or the row file is gone.
    /// Reserved and pinned rows keep their file; should one go all the same, its keys end here
    /// rather than never.
    fn end_unlaunched(&self, state: &mut State, mut flight: Flight, nowhere: bool) {
        let why = if nowhere {
            "too many reads are stuck"
        } else {
            "the row file is gone"
        };
        match flight.request.kind {
            JobKind::Load => {
                if nowhere {
                    let refused = &self.around.metrics.refused_loads;
                    refused.add(count(flight.rows.len()));
                }
                if state.readable() {
                    // A row that is found and cannot be loaded would be asked for again.
                    for entry in flight.rows.iter().filter_map(|row| row.entry) {
                        state.drop_entry(entry);
                    }
                }
                self.end_missed_load(state, &flight, Outcome::Miss, why);
                if let (Some(buffer), Some(buffers)) = (flight.buffer.take(), &mut state.buffers) {
                    buffers.take_back(buffer.memory, false);
                }
            }
            JobKind::Store => self.end_store(state, &flight, |_| Outcome::Dropped, Some(why)),
        }
    }

    /// Hands operations to the engine, without the lock: completions may come at once.
    pub(super) fn submit(&self, operations: Vec<Operation>) {
        if let Ok(engine) = self.engine() {
            engine.submit(operations);
        }
    }

    /// The operation that moves neighbouring rows between memory and their file.
    fn operation(
        &self,
        state: &mut State,
        run: &WaitingRun,
        buffer: Option<&LoadBuffer>,
        sums: &Sums,
    ) -> Option<Operation> {
        let request = &run.request;
        let first = run.rows.first()?;
        let row_file = state.inventory.row_file(first.place)?;
        let file = Arc::clone(&row_file.file);
        let geometry = row_file.geometry;
        let arena = &self.around.arena;
        let (direction, padding, prelude) = match request.kind {
            JobKind::Load => (Direction::Read, &self.scratch, Prelude::NONE),
            JobKind::Store => {
                let prelude = sums.prelude(self.digest, request, &run.rows, arena);
                (Direction::Write, &self.zeros, prelude)
            }
        };
        let segments = if let Some(LoadBuffer { memory, stride }) = buffer {
            vec![Segment {
                memory: Memory::Buffer(Arc::clone(memory)),
                offset: 0,
                length: stride.checked_mul(run.rows.len())?,
            }]
        } else {
            plan::segments(&run.rows, &request.items, &geometry, arena, padding)
        };
        Some(Operation {
            id: state.operation_id(),
            direction,
            file,
            channel: Channel::Rows,
            offset: geometry.row_offset(first.place.row),
            segments,
            deadline: request.deadline,
            started: Started::default(),
            prelude,
        })
    }
}

/// Where a run's rows are to be moved from or to.
fn target(state: &mut State, run: &WaitingRun) -> Target {
    let stride = run
        .rows
        .first()
        .and_then(|row| state.inventory.row_file(row.place))
        .and_then(|file| usize::try_from(file.geometry.row_stride_bytes()).ok());
    let Some(buffers) = state
        .buffers
        .as_mut()
        .filter(|_| run.request.kind == JobKind::Load)
    else {
        return Target::Slots;
    };
    let Some(stride) = stride else {
        // Without its file it is not read at all.
        return Target::Slots;
    };
    if buffers.exhausted() {
        return Target::Nowhere;
    }
    match buffers.lend(stride.saturating_mul(run.rows.len())) {
        Some(memory) => Target::Buffer(LoadBuffer { memory, stride }),
        None if buffers.any_lent() => Target::Later,
        None => Target::Nowhere,
    }
}
