//! Entries of rows whose bytes are on disk: written to the row table, then the keys are listed.

use crate::format::row_table::{Generation, RowEntry};
use crate::io::Direction;
use crate::job::Outcome;
use crate::metrics::count;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::inventory::NewRow;
use crate::tier::row_file::RowFile;
use crate::tier::state::{Flight, FlightRow, State};
use crate::tier::store::outcome_of;

impl DiskTier {
    /// Writes the entries of written rows, file by file, and lists the rows.
    pub(super) fn write_entries(&self, mut flights: Vec<Flight>) {
        flights.sort_by_key(|flight| flight.rows.first().map(|row| row.place));
        let same_file = |a: &Flight, b: &Flight| {
            a.rows.first().map(|row| row.place.container)
                == b.rows.first().map(|row| row.place.container)
        };
        for group in flights.chunk_by(same_file) {
            self.write_entries_of_file(group);
        }
    }

    fn write_entries_of_file(&self, flights: &[Flight]) {
        let now = self.around.clock.unix_seconds();
        let state = lock(&self.state);
        let first = flights.iter().flat_map(|flight| &flight.rows).next();
        let row_file = first
            .and_then(|row| state.inventory.row_file(row.place))
            .map(Arc::clone);
        // What was removed or reset meanwhile gets no entry at all.
        let refused = self.health.refuses(Direction::Write);
        let listable: Vec<(&Flight, &FlightRow)> = flights
            .iter()
            .flat_map(|flight| flight.rows.iter().map(move |row| (flight, row)))
            .filter(|(flight, row)| !refused && may_list(&state, flight, row))
            .collect();
        drop(state);
        if refused {
            let rows: usize = flights.iter().map(|flight| flight.rows.len()).sum();
            self.around.metrics.circuit_dropped_stores.add(count(rows));
        }
        let Some(row_file) = row_file else {
            return;
        };
        let incarnation = row_file.incarnation();
        let entries: Vec<(u32, RowEntry)> = listable
            .iter()
            .filter_map(|(flight, row)| {
                let item = flight.request.items.get(row.position)?;
                Some((
                    row.place.row,
                    RowEntry {
                        key: item.key,
                        generation: Generation {
                            incarnation,
                            counter: row.counter,
                        },
                        epoch: flight.epoch,
                        payload_bytes: u32::try_from(item.row_bytes).ok()?,
                        store_order: row.store_order,
                        access_time: now,
                        checksum: row.checksum.to_field(),
                    },
                ))
            })
            .collect();
        let written = self.enter(&row_file, &entries);
        if let (Err(error), Some(row)) = (&written, first) {
            self.file_failed(row.place.container, error);
        }
        let mut had_entry: Vec<u64> = listable.iter().map(|(_, row)| row.counter).collect();
        had_entry.sort_unstable();
        for flight in flights {
            self.list_rows(flight, &had_entry, written.as_ref().err(), now);
        }
    }

    fn enter(&self, row_file: &RowFile, entries: &[(u32, RowEntry)]) -> std::io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let written = row_file.write_entries(entries);
        if written.is_ok() {
            self.health.succeed(Direction::Write);
        }
        written
    }

    /// Lists the rows of a flight, the tail first, and settles its keys.
    fn list_rows(
        &self,
        flight: &Flight,
        had_entry: &[u64],
        error: Option<&std::io::Error>,
        now: u32,
    ) {
        let mut state = lock(&self.state);
        let mut failed = Vec::new();
        for row in flight.rows.iter().rev() {
            let Some(item) = flight.request.items.get(row.position) else {
                continue;
            };
            let on_disk = had_entry.binary_search(&row.counter).is_ok();
            if !on_disk || error.is_some() || !may_list(&state, flight, row) {
                failed.push(row.counter);
                // The entry may be there or not: it is cleared before the row is used again.
                state.inventory.free_row(row.place, on_disk);
                if on_disk {
                    state.clears.push(row.place);
                }
                continue;
            }
            let listed = state.inventory.publish(NewRow {
                fingerprint: item.fingerprint,
                place: row.place,
                checksum: row.checksum,
                store_order: row.store_order,
                access_time: now,
            });
            match listed {
                Some(entry) => {
                    flight.request.remember(row.position, entry);
                    state.keep_listed(entry, row.store_order, item.fingerprint);
                }
                None => failed.push(row.counter),
            }
        }
        let why = error.map(ToString::to_string);
        let outcome = error.map_or(Outcome::Dropped, |error| outcome_of(error.raw_os_error()));
        self.end_store(
            &mut state,
            flight,
            |row| {
                if failed.contains(&row.counter) {
                    outcome
                } else {
                    Outcome::Ok
                }
            },
            why.as_deref(),
        );
    }
}

/// Whether a written row may still be listed.
fn may_list(state: &State, flight: &Flight, row: &FlightRow) -> bool {
    flight.epoch == state.epoch
        && !state.reset_failed
        && flight
            .request
            .items
            .get(row.position)
            .is_some_and(|item| state.may_list(item.fingerprint, row.counter))
}
