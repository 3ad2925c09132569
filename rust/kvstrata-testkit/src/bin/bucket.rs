//! `bucket`: serves the test double of an object store until its input ends, without faults. The
//! first line it prints is the endpoint, the last one how many connections were made.

use std::error::Error;
use std::io::{Read, Write, stdin, stdout};

use kvstrata_testkit::Bucket;

fn main() -> Result<(), Box<dyn Error>> {
    let bucket = Bucket::start()?;
    let mut out = stdout();
    writeln!(out, "{}", bucket.endpoint())?;
    out.flush()?;
    stdin().read_to_end(&mut Vec::new())?;
    writeln!(out, "{}", bucket.connections())?;
    Ok(())
}
