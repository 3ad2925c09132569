//! The operating system's edge: files, time, threads. Nothing else in this crate calls `std::fs`,
//! reads a clock or sleeps, so these are the places where a test puts its faults.

pub(crate) mod bytes;
#[cfg(feature = "shuttle")]
mod checked;
pub mod clock;
pub mod errno;
pub mod fs;
#[cfg(feature = "instrumented")]
mod instrumented;
pub(crate) mod pages;
pub(crate) mod prefetch;
pub mod process;
pub mod sync;
