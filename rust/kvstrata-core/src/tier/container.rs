//! A row file as the tier's state holds it.

use crate::eviction::Class;
use crate::sys::sync::Arc;
use crate::tier::row_file::RowFile;
use crate::tier::rows::Rows;

/// A row file with the uses of its rows.
#[derive(Debug)]
pub struct Container {
    /// Header and table on disk.
    pub row_file: Arc<RowFile>,
    /// The class of its rows.
    pub class: Class,
    /// Who uses which row.
    pub rows: Rows,
    /// Bytes the file takes on the file system.
    pub allocated_bytes: u64,
    /// Whether the file vanished or was cut while open: nothing in it is used any more.
    pub lost: bool,
    /// Set when the last writer did not close the file cleanly: rows with a store order past
    /// the mark and before `opened_at` may be torn.
    pub torn_after: Option<u64>,
}
