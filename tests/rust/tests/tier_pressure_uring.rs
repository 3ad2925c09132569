//! The scenarios of `tier_pressure.rs` on the ring.

#[path = "tier_pressure.rs"]
mod scenarios;
