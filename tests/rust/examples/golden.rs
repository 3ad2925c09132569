//! Writes the golden files of the current format version:
//! `cargo run -p kvstrata-tests --example golden -- tests/rust/golden/v1`.
//! A released version's files are never written again; a new version gets a directory of its own.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure ends the program"
)]

#[path = "../golden/datagen.rs"]
mod datagen;

fn main() {
    let target = std::env::args_os()
        .nth(1)
        .expect("the directory to write is given");
    datagen::generate(target.as_ref());
}
