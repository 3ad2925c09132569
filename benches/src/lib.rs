//! Benchmarks of the core; see `benches/`.
