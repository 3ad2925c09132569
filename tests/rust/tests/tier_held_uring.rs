//! The scenario of `tier_held.rs` on the ring.

#[path = "tier_held.rs"]
mod scenarios;
