//! What the benchmarks share: settings, the ways to move bytes, measuring, printing.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark prints its figures, or why there are none"
)]

use std::process::ExitCode;

use kvstrata_core::error::Result;

pub mod alone;
mod blocks;
pub mod calls;
pub mod check;
mod fifo;
pub mod fio;
pub mod floor;
pub mod ground;
pub mod measure;
pub mod paths;
mod processor;
pub mod raw;
pub mod raw_ring;
pub mod replayed;
pub mod report;
pub mod settings;
pub mod whole;
pub mod workload;

/// Prints a line of the report.
pub fn say(line: &str) {
    println!("{line}");
}

/// How a benchmark ends; says why where it could not go on.
pub fn ended(result: &Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A number of bytes or rows as the core counts them.
pub fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
