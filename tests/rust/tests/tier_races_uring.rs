//! The scenarios of `tier_races.rs` on the ring.

#[path = "tier_races.rs"]
mod scenarios;
