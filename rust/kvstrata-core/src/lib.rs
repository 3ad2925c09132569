//! The core of kvstrata: row files, namespaces, I/O, index, eviction and tiers.
//!
//! Pure Rust: no Python, no torch, no environment variables, no globals. See `ARCHITECTURE.md`
//! for the way data takes through the modules, and `docs/FORMAT.md` for the bytes on disk.
pub mod buffer;
mod chunked;
pub mod config;
pub mod cpu;
pub mod error;
pub mod eviction;
pub mod format;
pub mod index;
pub mod io;
pub mod job;
pub mod key;
pub mod manager;
pub mod metrics;
pub mod namespace;
pub mod notice;
pub mod object;
pub mod simulate;
pub mod slots;
pub mod sys;
pub mod tier;
