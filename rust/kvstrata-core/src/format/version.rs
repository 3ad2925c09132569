//! The version of everything at a root: row files and `namespace.json`.

/// The version this code writes, and the only one it reads.
pub const FORMAT_VERSION: u32 = 1;
