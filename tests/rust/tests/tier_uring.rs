//! The scenarios of `tier.rs` on the ring.

#[path = "tier.rs"]
mod scenarios;
