//! The scenarios of `tier_faults.rs` on the ring.

#[path = "tier_faults.rs"]
mod scenarios;
