//! Checksums of rows on their way to disk.

use std::sync::OnceLock;

use crate::buffer::Arena;
use crate::format::checksum::{RowChecksum, row_checksum};
use crate::format::superblock::NamespaceDigest;
use crate::io::Prelude;
use crate::sys::sync::Arc;
use crate::tier::request::Request;
use crate::tier::state::FlightRow;

/// The checksums of an operation's rows, in their order: computed by its engine just before it
/// writes them, from slots that are the engine's until it gives the operation back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums(Arc<OnceLock<Vec<RowChecksum>>>);

impl Sums {
    /// What computes them.
    pub(crate) fn prelude(
        &self,
        digest: NamespaceDigest,
        request: &Arc<Request>,
        rows: &[FlightRow],
        arena: &Arc<Arena>,
    ) -> Prelude {
        let sums = Arc::clone(&self.0);
        let (request, arena) = (Arc::clone(request), Arc::clone(arena));
        let positions: Vec<usize> = rows.iter().map(|row| row.position).collect();
        Prelude::new(move || {
            let sum = |position: usize| {
                let item = request.items.get(position)?;
                let payload = arena.bytes(item.offset, item.row_bytes)?;
                Some(row_checksum(&digest, &item.key, payload))
            };
            // Every slot was checked to lie in the arena.
            if let Some(all) = positions.into_iter().map(sum).collect() {
                let _ = sums.set(all);
            }
        })
    }

    /// Gives each row its checksum; false when they were not computed.
    #[must_use]
    pub(crate) fn hand_out(&self, rows: &mut [FlightRow]) -> bool {
        let Some(sums) = self.0.get().filter(|sums| sums.len() == rows.len()) else {
            return false;
        };
        for (row, sum) in rows.iter_mut().zip(sums) {
            row.checksum = *sum;
        }
        true
    }
}
