//! The operating system's edge: files, time, threads. Nothing else in this crate calls `std::fs`,
//! reads a clock or sleeps, so these are the places where a test puts its faults.

pub mod clock;
pub mod fs;
pub mod sync;
