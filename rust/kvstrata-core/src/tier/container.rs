//! A row file as the tier's state holds it.

use crate::eviction::Class;
use crate::sys::sync::Arc;
use crate::tier::row_file::RowFile;
use crate::tier::rows::Rows;
use crate::tier::touched::TouchedPages;

/// A row file with the uses of its rows.
#[derive(Debug)]
pub(crate) struct Container {
    /// Header and table on disk.
    pub(crate) row_file: Arc<RowFile>,
    /// The class of its rows.
    pub(crate) class: Class,
    /// Who uses which row.
    pub(crate) rows: Rows,
    /// Bytes the file takes on the file system, or will when all its rows are written.
    pub(crate) allocated_bytes: u64,
    /// Pages of its row table in which access times are newer in memory than on disk.
    pub(crate) touched: TouchedPages,
    /// Whether the last attempt to write its header or table failed: its rows are served, but
    /// none is taken or evicted for a store until it is tried again.
    pub(crate) unwritable: bool,
    /// Whether the file vanished or was cut while open: nothing in it is used any more.
    pub(crate) lost: bool,
    /// Set when the last writer did not close the file cleanly: rows with a store order past
    /// the mark and before `opened_at` may be torn.
    pub(crate) torn_after: Option<u64>,
}

impl Container {
    /// Whether stores may take rows of the file.
    pub(crate) const fn takes_rows(&self) -> bool {
        !self.lost && !self.unwritable
    }
}
