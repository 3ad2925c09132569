//! The scenarios of `tier_buffered_loads.rs` on the ring.

#[path = "tier_buffered_loads.rs"]
mod scenarios;
