//! Access times on their way to the row tables, so that recency survives a process that is killed.
//!
//! A touch marks the page of the row table that holds the row's entry. Once the first mark is
//! [`WAIT_SECONDS`](crate::tier::touched::WAIT_SECONDS) old, the writer thread rewrites the marked pages' entries, a slice at a time
//! between its other work, until none is left. Where nothing is touched nothing happens.

use crate::eviction::ContainerId;
use crate::index::RowPlace;
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::inventory::{Inventory, container_at};
use crate::tier::row_file::RowFile;
use crate::tier::rows::RowUse;
use crate::tier::touched::ROWS_PER_PAGE;

/// Pages of a row table written at a time: 2,048 rows, a fraction of a millisecond.
const SLICE_PAGES: usize = 64;

/// Rows of one file with access times to be written.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    /// The file; `None` when nothing of what was touched is there any more.
    file: Option<(ContainerId, Arc<RowFile>)>,
    /// The rows and when each was used last, seconds since 1970.
    rows: Vec<(RowPlace, u32)>,
}

impl Inventory {
    /// Takes the rows of up to `pages_max` touched pages, all of one file, with their new access
    /// times: from now on they count as written.
    fn take_touched(&mut self, pages_max: usize) -> Touched {
        let mut taken = Touched::default();
        for _ in 0..pages_max {
            let same_file = |id| taken.file.as_ref().is_none_or(|(first, _)| *first == id);
            let Some((id, page)) = self.touched.pop_if(same_file) else {
                break;
            };
            let Some(container) = container_at(&mut self.containers, id) else {
                continue;
            };
            if !container.touched.take(page) || container.lost {
                continue;
            }
            let first = page.saturating_mul(ROWS_PER_PAGE);
            for row in first..first.saturating_add(ROWS_PER_PAGE) {
                if let RowUse::Occupied(entry) = container.rows.get(row)
                    && let Some(entry) = self.index.get_mut(entry)
                    && core::mem::take(&mut entry.access_dirty)
                {
                    taken.rows.push((entry.place, entry.access_time));
                }
            }
            taken.file = Some((id, Arc::clone(&container.row_file)));
        }
        taken
    }
}

impl DiskTier {
    /// Writes one slice of access times.
    pub(super) fn write_touched(&self) {
        let touched = lock(&self.state).inventory.take_touched(SLICE_PAGES);
        let Some((_, file)) = touched.file else {
            return;
        };
        if let Err(error) = file.write_access_times(&touched.rows, self.writer) {
            // A little recency is lost, no row: it is not tried again before the next touch.
            self.around.metrics.errors.add(1);
            self.around.notices.say(Level::Warning, "touches", || {
                let path = file.path();
                format!(
                    "access times of {} are not recorded: {error}",
                    path.display()
                )
            });
        }
    }
}
