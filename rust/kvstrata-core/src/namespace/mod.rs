//! A namespace: the directory, named by its manifest's digest, in which bytes are interchangeable.

mod canonical;
pub mod directory;
pub mod epoch;
pub mod fingerprint;
pub mod layout;
pub mod lease;
pub mod manifest;

pub use directory::Namespace;
pub use epoch::Epochs;
pub use fingerprint::Fingerprint;
pub use lease::Lease;
pub use manifest::{Difference, Manifest};
