//! The scenarios of `tier_circuit.rs` on the ring.

#[path = "tier_circuit.rs"]
mod scenarios;
