//! Test doubles for the core: an engine that fails on request, a clock that a test sets, memory to
//! lend, payloads that can be checked. Nothing here is part of the product.

pub mod clock;
pub mod completions;
pub mod faulty;
pub mod memory;
pub mod payload;

pub use clock::ManualClock;
pub use completions::Completions;
pub use faulty::{Fault, FaultyEngine};
