//! What the benchmarks share: settings, measuring, printing.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

pub mod measure;
pub mod raw;
pub mod settings;
pub mod whole;

/// Prints a line of the report.
pub fn say(line: &str) {
    println!("{line}");
}
