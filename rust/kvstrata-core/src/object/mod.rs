//! Object stores: one object per row, behind the trait of the `object_store` crate.
//!
//! Nothing here knows jobs: it names objects, writes and checks their headers, moves one row
//! between a slot and an object, and says in a word what failed. `tier::object` does the rest.

mod bounded;
mod census;
mod client;
pub mod connect;
mod connector;
mod credentials;
mod cut;
pub mod epoch_record;
pub mod failure;
pub mod gc;
mod google_file;
pub mod header;
pub mod limits;
pub mod location;
mod named_files;
pub mod names;
pub(crate) mod newest;
pub mod options;
mod page;
mod pages;
pub mod probe;
pub(crate) mod reach;
mod refusal;
mod resolver;
pub(crate) mod signing;
mod slot;
mod token_files;
pub mod transfer;
mod verdict_table;
pub mod verdicts;

use crate::sys::sync::Arc;

pub use failure::{Failure, FailureKind};
pub use header::{HEADER_BYTES, RowHeader};
pub use location::{Location, Scheme};
pub use named_files::NamedFiles;
pub use options::{Addressing, ObjectOptions};
pub use verdicts::{Fact, Verdicts};

/// A client of an object store; tests put doubles here.
pub type Store = Arc<dyn object_store::ObjectStore>;

/// A store that keeps its objects in this process's memory, for tests.
#[must_use]
pub fn memory_store() -> Store {
    Arc::new(object_store::memory::InMemory::new())
}
