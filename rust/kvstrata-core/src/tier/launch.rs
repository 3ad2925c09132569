//! Rows on their way to the engine: each operation becomes a flight.

use crate::io::{Channel, Direction, Operation};
use crate::job::{JobKind, Outcome};
use crate::sys::sync::Arc;
use crate::tier::disk::{DiskTier, count, plain};
use crate::tier::plan;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};

impl DiskTier {
    /// Makes one operation per run of neighbouring rows and enters each as a flight.
    pub(super) fn launch(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        runs: Vec<Vec<FlightRow>>,
        epoch: u32,
    ) -> Vec<Operation> {
        let mut operations = Vec::with_capacity(runs.len());
        for rows in runs {
            let operation = self.operation(state, request, &rows);
            let request = Arc::clone(request);
            let flight = Flight {
                request,
                rows,
                epoch,
                abandoned: false,
            };
            let Some(operation) = operation else {
                // Reserved and pinned rows keep their file; should one go all the same, its keys
                // end here rather than never.
                self.end_unlaunched(state, &flight);
                continue;
            };
            if operation.direction == Direction::Write {
                let bytes: usize = operation.segments.iter().map(|part| part.length).sum();
                self.around.metrics.bytes_written.add(count(bytes));
            }
            state.flights.insert(operation.id, flight);
            operations.push(operation);
        }
        operations
    }

    fn end_unlaunched(&self, state: &mut State, flight: &Flight) {
        let why = Some("the row file is gone");
        match flight.request.kind {
            JobKind::Load => {
                let misses: Vec<_> = flight
                    .rows
                    .iter()
                    .map(|row| plain(row.position, Outcome::Miss))
                    .collect();
                self.end_load(state, flight, &misses, why);
            }
            JobKind::Store => self.end_store(state, flight, |_| Outcome::Dropped, why),
        }
    }

    /// Hands operations to the engine, without the lock: completions may come at once.
    pub(super) fn submit(&self, operations: Vec<Operation>) {
        if let Ok(engine) = self.engine() {
            engine.submit(operations);
        }
    }

    /// The operation that moves neighbouring rows between their slots and their file.
    fn operation(
        &self,
        state: &mut State,
        request: &Arc<Request>,
        run: &[FlightRow],
    ) -> Option<Operation> {
        let first = run.first()?;
        let row_file = state.inventory.row_file(first.place)?;
        let file = Arc::clone(&row_file.file);
        let geometry = row_file.geometry;
        let (direction, padding) = match request.kind {
            JobKind::Load => (Direction::Read, &self.scratch),
            JobKind::Store => (Direction::Write, &self.zeros),
        };
        let segments = plan::segments(run, &request.items, &geometry, &self.around.arena, padding);
        Some(Operation {
            id: state.operation_id(),
            direction,
            file,
            channel: Channel::Rows,
            offset: geometry.row_offset(first.place.row),
            segments,
            deadline: request.deadline,
        })
    }
}
