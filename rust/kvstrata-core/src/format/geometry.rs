//! Where everything in a row file lies.

use thiserror::Error;

use super::row_table::ENTRY_BYTES;
use crate::key::GroupId;

/// Superblock, change page, table and rows all start at multiples of this many bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Offset of the change page in bytes.
pub const CHANGE_PAGE_OFFSET: u64 = PAGE_BYTES;
/// Offset of the row table in bytes.
pub const TABLE_OFFSET: u64 = 2 * PAGE_BYTES;
/// Most payload bytes of a row: a length fits `u32` and one transfer fits the kernel's limit.
pub const ROW_BYTES_MAX: u64 = 1 << 30;
/// Most bytes of a row file with more than one row: returning one file to the file system gives
/// back a useful amount without throwing away much.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Most regions with a counter of their own in the change page.
pub const REGIONS_MAX: u32 = 500;

/// Bytes of an entry, as an offset counts them.
const ENTRY: u64 = 128;

const _: () = assert!(ENTRY_BYTES == 128);
const _: () = assert!(512 % ENTRY == 0, "an entry would cross a sector");
const _: () = assert!(
    PAGE_BYTES.is_multiple_of(ENTRY),
    "an entry would cross a page"
);
const _: () = assert!(ROW_BYTES_MAX.is_multiple_of(PAGE_BYTES));

/// Why a geometry is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The payload size is out of range.
    #[error("a row has {0} bytes; 1 to {ROW_BYTES_MAX} are possible")]
    RowBytes(u64),
    /// The stride is not the payload size rounded up to a page.
    #[error("rows of {row_bytes} bytes have a stride of {row_stride_bytes} bytes")]
    Stride {
        /// Payload bytes of a row.
        row_bytes: u64,
        /// The stride found.
        row_stride_bytes: u64,
    },
    /// No row, or more than fit the largest file.
    #[error("a file has {0} rows; at least one is needed, in at most {FILE_BYTES_MAX} bytes")]
    RowCount(u32),
}

/// The shape of a row file. Every value of this type is within the format's limits, so that no sum
/// of its offsets overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    group: GroupId,
    row_bytes: u64,
    row_count: u32,
}

/// `bytes` rounded up to whole pages; `bytes` is at most a file's.
const fn rounded(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES
}

/// `value` as an offset counts.
const fn wide(value: u32) -> u64 {
    #[expect(
        clippy::as_conversions,
        reason = "u32 to u64 loses nothing; From is not const"
    )]
    let wide = value as u64;
    wide
}

impl Geometry {
    /// The geometry of `row_count` rows of `row_bytes` payload bytes each.
    ///
    /// # Errors
    /// [`GeometryError`] outside the format's limits.
    pub fn new(group: GroupId, row_bytes: u64, row_count: u32) -> Result<Self, GeometryError> {
        if !(1..=ROW_BYTES_MAX).contains(&row_bytes) {
            return Err(GeometryError::RowBytes(row_bytes));
        }
        let geometry = Self {
            group,
            row_bytes,
            row_count,
        };
        let fits = row_count == 1 || geometry.file_bytes() <= FILE_BYTES_MAX;
        if row_count == 0 || !fits {
            return Err(GeometryError::RowCount(row_count));
        }
        Ok(geometry)
    }

    /// The file with as many rows as fit into `file_budget_bytes` (header and table included), at
    /// least one, and not more than [`FILE_BYTES_MAX`] bytes unless one row alone is larger.
    ///
    /// # Errors
    /// [`GeometryError::RowBytes`].
    pub fn for_budget(
        group: GroupId,
        row_bytes: u64,
        file_budget_bytes: u64,
    ) -> Result<Self, GeometryError> {
        let one = Self::new(group, row_bytes, 1)?;
        let budget = file_budget_bytes.min(FILE_BYTES_MAX);
        let per_row = one.row_stride_bytes() + ENTRY;
        let count = u32::try_from(budget.saturating_sub(TABLE_OFFSET) / per_row).unwrap_or(1);
        let guess = Self {
            row_count: count.max(1),
            ..one
        };
        // Rounding the table up to a page may cost the last row.
        let excess = u32::from(guess.file_bytes() > budget);
        Self::new(group, row_bytes, (guess.row_count - excess).max(1))
    }

    /// Bytes of the smallest file that holds a row of `row_bytes`.
    ///
    /// # Errors
    /// [`GeometryError::RowBytes`].
    pub fn minimum_file_bytes(row_bytes: u64) -> Result<u64, GeometryError> {
        Ok(Self::new(GroupId(0), row_bytes, 1)?.file_bytes())
    }

    /// The KV cache group whose rows the file holds.
    pub const fn group(&self) -> GroupId {
        self.group
    }

    /// Payload bytes of a row.
    pub const fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes from one row to the next: the payload rounded up to a page.
    pub const fn row_stride_bytes(&self) -> u64 {
        rounded(self.row_bytes)
    }

    /// Number of rows.
    pub const fn row_count(&self) -> u32 {
        self.row_count
    }

    /// Offset of the row table in bytes.
    pub const fn table_offset(&self) -> u64 {
        TABLE_OFFSET
    }

    /// Bytes of the row table, whole pages.
    pub const fn table_bytes(&self) -> u64 {
        rounded(wide(self.row_count) * ENTRY)
    }

    /// Offset of row 0 in bytes.
    pub const fn rows_offset(&self) -> u64 {
        TABLE_OFFSET + self.table_bytes()
    }

    /// Offset of `row` in bytes. Meaningful for rows below [`Geometry::row_count`] only.
    pub const fn row_offset(&self, row: u32) -> u64 {
        self.rows_offset() + wide(row) * self.row_stride_bytes()
    }

    /// Offset of the entry of `row` in bytes. Meaningful for rows below [`Geometry::row_count`]
    /// only.
    pub const fn entry_offset(&self, row: u32) -> u64 {
        TABLE_OFFSET + wide(row) * ENTRY
    }

    /// Bytes of the whole file.
    pub const fn file_bytes(&self) -> u64 {
        self.row_offset(self.row_count)
    }

    /// Pages of the row table that share a counter of the change page.
    const fn region_pages(&self) -> u64 {
        (self.table_bytes() / PAGE_BYTES).div_ceil(wide(REGIONS_MAX))
    }

    /// Region of the row table in which the entry of `row` lies.
    pub fn region_of(&self, row: u32) -> u32 {
        let page = wide(row) * ENTRY / PAGE_BYTES;
        u32::try_from(page / self.region_pages()).unwrap_or(u32::MAX)
    }

    /// Number of regions of the row table, at most [`REGIONS_MAX`].
    pub fn region_count(&self) -> u32 {
        self.region_of(self.row_count - 1) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: GroupId = GroupId(3);

    #[test]
    fn a_file_of_64_kib_rows_has_its_parts_where_the_format_says() {
        let geometry = Geometry::new(GROUP, 65536, 100).unwrap();
        assert_eq!(geometry.row_stride_bytes(), 65536);
        assert_eq!(geometry.table_bytes(), 16384);
        assert_eq!(geometry.rows_offset(), 8192 + 16384);
        assert_eq!(geometry.entry_offset(33), 8192 + 33 * 128);
        assert_eq!(geometry.row_offset(2), 24576 + 2 * 65536);
        assert_eq!(geometry.file_bytes(), 24576 + 100 * 65536);
    }

    #[test]
    fn a_budget_is_used_as_far_as_whole_rows_go() {
        for row_bytes in [1, 4096, 4097, 65536, 1 << 20, 300 << 20] {
            for budget in [0, 1 << 16, 10 << 20, FILE_BYTES_MAX, u64::MAX] {
                let geometry = Geometry::for_budget(GROUP, row_bytes, budget).unwrap();
                let limit = budget.min(FILE_BYTES_MAX);
                assert!(geometry.file_bytes() <= limit || geometry.row_count() == 1);
                let more = Geometry {
                    row_count: geometry.row_count() + 1,
                    ..geometry
                };
                assert!(
                    more.file_bytes() > limit,
                    "{row_bytes} {budget} could have one row more"
                );
            }
        }
    }

    #[test]
    fn sizes_outside_the_limits_are_refused() {
        assert_eq!(Geometry::new(GROUP, 0, 1), Err(GeometryError::RowBytes(0)));
        let large = ROW_BYTES_MAX + 1;
        assert_eq!(
            Geometry::new(GROUP, large, 1),
            Err(GeometryError::RowBytes(large))
        );
        assert_eq!(Geometry::new(GROUP, 1, 0), Err(GeometryError::RowCount(0)));
        assert_eq!(
            Geometry::new(GROUP, 1, u32::MAX),
            Err(GeometryError::RowCount(u32::MAX))
        );
        assert!(Geometry::new(GROUP, ROW_BYTES_MAX, 1).is_ok());
        assert!(Geometry::new(GROUP, ROW_BYTES_MAX, 2).is_err());
    }

    #[test]
    fn every_row_belongs_to_one_of_at_most_500_regions_of_whole_pages() {
        for row_bytes in [1, 65536] {
            let geometry = Geometry::for_budget(GROUP, row_bytes, u64::MAX).unwrap();
            assert!(geometry.region_count() <= REGIONS_MAX);
            for row in 1..geometry.row_count() {
                let step = geometry.region_of(row) - geometry.region_of(row - 1);
                let page_start = geometry.entry_offset(row).is_multiple_of(PAGE_BYTES);
                assert!(step == 0 || (step == 1 && page_start));
            }
        }
    }
}
