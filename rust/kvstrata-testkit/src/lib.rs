//! Test doubles for the core: faulty engine, manual clock, generators.
