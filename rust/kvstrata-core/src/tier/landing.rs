//! Rows that a read has brought: verified where they lie, copied to whoever waits for them.

use crate::format::checksum::row_checksum;
use crate::job::{Outcome, Settlement};
use crate::metrics::count;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::request::Request;
use crate::tier::state::{Flight, FlightRow, State};
use crate::tier::waiters::Waiter;

/// What the bytes that were read came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// They are the key's.
    Good,
    /// They are not, although the row's entry says so.
    Corrupt,
    /// They are not, and the row's entry has changed.
    Replaced,
}

impl DiskTier {
    /// Compares each row with its checksum, which covers namespace, key and length. Those that
    /// differ have their entries read again: an entry that has changed explains it.
    pub(super) fn verify_rows(&self, flight: &Flight) -> Vec<Verdict> {
        let verdict = |(at, row): (usize, &FlightRow)| {
            let item = flight.request.items.get(row.position);
            let good = item.is_some_and(|item| {
                self.landed(flight, at).is_some_and(|payload| {
                    row_checksum(&self.digest, &item.key, payload) == row.checksum
                })
            });
            if good {
                Verdict::Good
            } else if self.entry_changed(flight, row) {
                Verdict::Replaced
            } else {
                Verdict::Corrupt
            }
        };
        flight.rows.iter().enumerate().map(verdict).collect()
    }

    /// The bytes that were read for the row at position `at` of a flight.
    fn landed<'a>(&'a self, flight: &'a Flight, at: usize) -> Option<&'a [u8]> {
        let item = flight.request.items.get(flight.rows.get(at)?.position)?;
        match &flight.buffer {
            Some(buffer) => buffer.row(at, item.row_bytes),
            None => self.around.arena.bytes(item.offset, item.row_bytes),
        }
    }

    /// Whether the entry on disk no longer is the one the row was indexed by. Taken for unchanged
    /// where the look could hang: this is the engine's thread, and of a ring the only one.
    fn entry_changed(&self, flight: &Flight, row: &FlightRow) -> bool {
        if self.capabilities.may_hang {
            return false;
        }
        let Some(item) = flight.request.items.get(row.position) else {
            return true;
        };
        let file = lock(&self.state)
            .inventory
            .row_file(row.place)
            .map(Arc::clone);
        match file.map(|file| file.read_entry(row.place.row)) {
            Some(Ok(Some(entry))) => {
                entry.key != item.key || entry.checksum != row.checksum.to_field()
            }
            Some(Ok(None) | Err(_)) | None => true,
        }
    }

    /// Copies verified rows from where they were read to every slot that they are for. Called
    /// without the lock, before any of the keys is settled: all slots belong to their jobs. Returns
    /// the waiters whose slots hold their rows, and the others.
    pub(super) fn hand_out(
        &self,
        flight: &Flight,
        verdicts: &mut [Verdict],
        waiters: Vec<Vec<Waiter>>,
    ) -> (Vec<Waiter>, Vec<Waiter>) {
        let (mut served, mut missed) = (Vec::new(), Vec::new());
        let arena = &self.around.arena;
        let rows = flight.rows.iter().zip(verdicts).zip(waiters).enumerate();
        for (at, ((row, verdict), waiters)) in rows {
            let item = flight.request.items.get(row.position);
            let landed = item.zip(self.landed(flight, at));
            let Some((item, payload)) = landed.filter(|_| *verdict == Verdict::Good) else {
                missed.extend(waiters);
                continue;
            };
            if flight.buffer.is_some() && !arena.copy_in(item.offset, payload) {
                *verdict = Verdict::Replaced;
            }
            for waiter in waiters {
                // The checksum was that of the leader's key: only the same key may have the row.
                let copied = waiter
                    .request
                    .items
                    .get(waiter.position)
                    .is_some_and(|own| own.key == item.key && arena.copy_in(own.offset, payload));
                if copied {
                    served.push(waiter);
                } else {
                    missed.push(waiter);
                }
            }
        }
        (served, missed)
    }

    /// Gives everyone who waited for a read the same outcome.
    pub(super) fn settle_waiters(
        &self,
        state: &mut State,
        mut waiters: Vec<Waiter>,
        outcome: Outcome,
        error: Option<&str>,
    ) {
        waiters.sort_by_key(|waiter| Arc::as_ptr(&waiter.request).addr());
        for own in waiters.chunk_by(|a, b| Arc::ptr_eq(&a.request, &b.request)) {
            let Some(Waiter { request, .. }) = own.first() else {
                continue;
            };
            let settlements: Vec<_> = own
                .iter()
                .map(|waiter| settlement(request, waiter.position, outcome))
                .collect();
            self.settle(state, request, &settlements, error);
        }
    }
}

/// The end of a key of a load.
pub(super) fn settlement(request: &Request, position: usize, outcome: Outcome) -> Settlement {
    let bytes = match (outcome, request.items.get(position)) {
        (Outcome::Ok, Some(item)) => count(item.row_bytes),
        _ => 0,
    };
    Settlement {
        bytes,
        ..Settlement::plain(position, outcome)
    }
}
