//! Loads of a row that is being read already: they wait for that read instead of asking for one.

use hashbrown::HashMap;

use crate::eviction::EntryId;
use crate::sys::sync::Arc;
use crate::tier::request::Request;

/// A key of a load that waits for another load's read of its row.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    /// The job.
    pub(crate) request: Arc<Request>,
    /// Position of the key in it.
    pub(crate) position: usize,
}

/// Who waits for which row. A row is here from the time its read is planned until that read is
/// settled; whoever reads it keeps it pinned, so that its entry stands for nothing else.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    by_row: HashMap<EntryId, Vec<Waiter>>,
}

impl Waiters {
    /// Notes that a row is about to be read.
    pub(crate) fn begin(&mut self, row: EntryId) {
        self.by_row.insert(row, Vec::new());
    }

    /// Joins the read of a row; false when nobody reads it.
    pub(crate) fn join(&mut self, row: EntryId, request: &Arc<Request>, position: usize) -> bool {
        let Some(waiters) = self.by_row.get_mut(&row) else {
            return false;
        };
        waiters.push(Waiter {
            request: Arc::clone(request),
            position,
        });
        true
    }

    /// Ends the read of a row: nobody joins it any more. Returns who did.
    pub(crate) fn end(&mut self, row: EntryId) -> Vec<Waiter> {
        self.by_row.remove(&row).unwrap_or_default()
    }

    /// Takes the keys of a job out, wherever they wait: their rows and positions.
    pub(crate) fn leave(&mut self, request: &Arc<Request>) -> Vec<(EntryId, usize)> {
        let mut left = Vec::new();
        for (row, waiters) in &mut self.by_row {
            waiters.retain(|waiter| {
                let own = Arc::ptr_eq(&waiter.request, request);
                if own {
                    left.push((*row, waiter.position));
                }
                !own
            });
        }
        left
    }

    /// Number of rows that are being read.
    pub(crate) fn rows(&self) -> usize {
        self.by_row.len()
    }
}
