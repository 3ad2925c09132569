//! Test doubles for the core: an engine that fails on request, a clock that a test sets, memory to
//! lend, payloads that can be checked. Nothing here is part of the product.

pub mod allocation;
pub mod bucket;
pub mod clock;
pub mod completions;
pub mod crash_point;
pub mod faulty;
pub mod gathering;
pub mod kernel;
pub mod memory;
pub mod payload;
pub mod sandbox;
mod seccomp;
pub mod stored_rows;
pub mod unguarded;

pub use bucket::{Bucket, BucketFault, Method, Rule, Style as BucketStyle};
pub use clock::ManualClock;
pub use completions::Completions;
pub use faulty::{Fault, FaultyEngine};
pub use gathering::Gathering;
pub use unguarded::Unguarded;
