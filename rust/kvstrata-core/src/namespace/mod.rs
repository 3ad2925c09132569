//! A namespace: the directory, named by its manifest's digest, in which bytes are interchangeable.

mod canonical;
pub mod directory;
pub mod epoch;
pub mod layout;
pub mod manifest;

pub use directory::Namespace;
pub use epoch::Epochs;
pub use manifest::{Difference, Manifest};
