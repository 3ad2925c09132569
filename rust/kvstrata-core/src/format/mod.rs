//! The bytes of a row file, as `docs/FORMAT.md` states them. Pure: no clock, no files, no threads.

pub mod change_page;
pub mod checksum;
pub mod combined;
mod field;
pub mod geometry;
pub mod row_table;
pub mod superblock;
pub mod version;

pub use change_page::ChangePage;
pub use checksum::{ChecksumKind, RowChecksum, RowHasher};
pub use geometry::{Geometry, GeometryError};
pub use row_table::{ENTRY_BYTES, EntryError, Generation, RowEntry, RowState};
pub use superblock::{FileId, FormatError, NamespaceDigest, Superblock, WriterId};
pub use version::FORMAT_VERSION;
