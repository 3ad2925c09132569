//! The scenarios of `tier_loads.rs` on the ring.

#[path = "tier_loads.rs"]
mod scenarios;
