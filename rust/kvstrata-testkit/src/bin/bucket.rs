//! `bucket [MIB]`: serves the test double of an object store until its input ends, without faults,
//! and keeps so many MiB of the newest objects. The first line it prints is the endpoint, the last
//! one how many connections were made.

use std::error::Error;
use std::io::{Read, Write, stdin, stdout};

use kvstrata_testkit::Bucket;

fn main() -> Result<(), Box<dyn Error>> {
    let bucket = Bucket::start()?;
    bucket.trust();
    if let Some(mib) = std::env::args().nth(1) {
        bucket.keep_newest(mib.parse::<usize>()? << 20);
    }
    let mut out = stdout();
    writeln!(out, "{}", bucket.endpoint())?;
    out.flush()?;
    stdin().read_to_end(&mut Vec::new())?;
    writeln!(out, "{}", bucket.connections())?;
    Ok(())
}
