//! Loads that end before the kernel has returned their reads.
//!
//! A load may end at its deadline where that frees nothing the kernel may still write: while it
//! waits for another load's read, while it waits for a buffer, when its rows are read to buffers of
//! the tier's own, and when the caller leaves busy slots alone.

use crate::eviction::EntryId;
use crate::io::Direction;
use crate::job::{Outcome, Settlement};
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::load_buffers::LoadBuffers;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};
use crate::tier::waiters::Waiter;

const LATE: &str = "the device did not answer by the deadline";
const LATE_FOR_ANOTHER: &str = "the read that was waited for was given up";

impl DiskTier {
    /// Ends what of a load may end at its deadline. Its rows are misses from now on, and so they
    /// are for every load that waits for the same reads: reading them again would take the next
    /// thread to a device that does not answer.
    pub(super) fn expire_load(&self, request: &Arc<Request>) {
        let mut state = lock(&self.state);
        self.abandon_load(&mut state, request);
        // Others that wait for a buffer get one now, or learn that they will not.
        let operations = self.launch_waiting(&mut state);
        drop(state);
        self.submit(operations);
    }

    /// Ends every load whose reads go to buffers: the tier closes.
    pub(super) fn give_up_buffered_loads(&self) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let Some(buffers) = &state.buffers else {
            return;
        };
        let reading = state
            .flights
            .values()
            .filter(|flight| flight.buffer.is_some() && !flight.abandoned)
            .map(|flight| &flight.request);
        let waiting = buffers.waiting.iter().map(|run| &run.request);
        let requests: Vec<_> = reading.chain(waiting).map(Arc::clone).collect();
        for request in requests {
            self.abandon_load(state, &request);
        }
    }

    fn abandon_load(&self, state: &mut State, request: &Arc<Request>) {
        let mut settlements = Vec::new();
        let mut rows = Vec::new();
        let mut dropped = Vec::new();
        for (row, position) in state.waiters.leave(request) {
            settlements.push(Settlement::plain(position, Outcome::Timeout));
            dropped.push(row);
        }
        if self.honours_busy || state.buffers.is_some() {
            abandon_flights(state, request, &mut settlements, &mut rows);
        }
        let unread = state
            .buffers
            .as_mut()
            .map(|buffers| take_waiting(buffers, request));
        for row in unread.into_iter().flatten() {
            settlements.push(Settlement::plain(row.position, Outcome::Timeout));
            rows.extend(row.entry);
            if let Some(entry) = row.entry {
                state.unpin(entry);
            }
        }
        let mut followers: Vec<Waiter> = Vec::new();
        for row in rows {
            followers.extend(state.waiters.end(row));
            dropped.push(row);
        }
        // Where reads are given up everything is a miss anyway, and the rows may be as good as
        // ever afterwards: they stay.
        if !self.health.refuses(Direction::Read) {
            for row in dropped {
                state.drop_entry(row);
            }
        }
        self.settle(state, request, &settlements, Some(LATE));
        self.settle_waiters(state, followers, Outcome::Miss, Some(LATE_FOR_ANOTHER));
        if !state.clears.is_empty() {
            self.work.notify_one();
        }
    }
}

/// Gives up the reads of a job; what they are read to stays theirs.
fn abandon_flights(
    state: &mut State,
    request: &Arc<Request>,
    settlements: &mut Vec<Settlement>,
    rows: &mut Vec<EntryId>,
) {
    let own = |flight: &&mut Flight| Arc::ptr_eq(&flight.request, request) && !flight.abandoned;
    for flight in state.flights.values_mut().filter(own) {
        flight.abandoned = true;
        if let (Some(buffer), Some(buffers)) = (&flight.buffer, &mut state.buffers) {
            buffers.give_up(&buffer.memory);
        }
        for row in &flight.rows {
            settlements.push(Settlement {
                busy: flight.buffer.is_none(),
                ..Settlement::plain(row.position, Outcome::Timeout)
            });
            rows.extend(row.entry);
        }
    }
}

/// Takes the rows of a job that wait for a buffer out of the queue.
fn take_waiting(buffers: &mut LoadBuffers, request: &Arc<Request>) -> Vec<FlightRow> {
    let (own, others) = buffers
        .waiting
        .drain(..)
        .partition::<Vec<_>, _>(|run| Arc::ptr_eq(&run.request, request));
    buffers.waiting.extend(others);
    own.into_iter().flat_map(|run| run.rows).collect()
}
