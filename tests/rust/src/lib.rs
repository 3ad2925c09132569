//! Integration tests of the core; see `tests/`.
