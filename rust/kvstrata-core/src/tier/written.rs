//! Rows whose bytes are on disk and whose entries are not yet.
//!
//! A call for each row would cost more than the row: entries are written together, as soon as a
//! job waits for nothing else, or when there are many.

use crate::sys::sync::Arc;
use crate::tier::request::Request;
use crate::tier::state::Flight;

/// Rows whose entries are written without waiting for more.
const ROWS_MAX: usize = 512;

/// Rows that wait for their entries.
#[derive(Debug, Default)]
pub(crate) struct Written {
    flights: Vec<Flight>,
    rows: usize,
    /// Whether a job waits for nothing else.
    awaited: bool,
}

impl Written {
    /// Takes rows in; says whether the writer thread should write entries now.
    pub(crate) fn push(&mut self, flight: Flight) -> bool {
        self.rows = self.rows.saturating_add(flight.rows.len());
        self.awaited |= flight.request.wrote(flight.rows.len());
        self.flights.push(flight);
        self.is_due()
    }

    /// Notes that keys of a job have ended; says whether the job now waits for entries alone.
    pub(crate) fn settled(&mut self, request: &Request) -> bool {
        let waits = request.waits_for_entries();
        self.awaited |= waits;
        waits
    }

    /// Whether entries should be written now.
    pub(crate) const fn is_due(&self) -> bool {
        self.awaited || self.rows >= ROWS_MAX
    }

    /// Whether no row waits.
    pub(crate) const fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Takes all of them.
    pub(crate) fn take(&mut self) -> Vec<Flight> {
        let taken = core::mem::take(self);
        for flight in &taken.flights {
            flight.request.entered(flight.rows.len());
        }
        taken.flights
    }

    /// The jobs they belong to.
    pub(crate) fn requests(flights: &[Flight]) -> Vec<Arc<Request>> {
        let request = |flight: &Flight| Arc::clone(&flight.request);
        flights.iter().map(request).collect()
    }
}
