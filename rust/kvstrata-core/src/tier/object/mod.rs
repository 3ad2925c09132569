//! The object tier: a bucket, or what speaks like one, as the lowest stratum.
//!
//! Whoever calls from the engine meets one lock and no request: requests run on a runtime of the
//! tier's own. A row is one object under `<epoch>/<fan-out>/<key>`; it is read straight into its
//! slot and verified there, and written straight from it.

mod close;
mod counters;
mod deletions;
mod dispatch;
mod epochs;
mod health;
mod join;
mod listing;
mod load;
mod lookup;
mod open;
mod removal;
mod reset;
mod serve;
mod settle;
mod state;
mod stats;
mod store;
mod told;

use core::fmt;
use core::time::Duration;
use std::collections::BTreeMap;

use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Notify, watch};

use crate::format::NamespaceDigest;
use crate::format::combined::Shift;
use crate::index::Fingerprinter;
use crate::key::GroupId;
use crate::metrics::Counter;
use crate::namespace::Manifest;
use crate::object::connect::Style;
use crate::object::names::{Epoch, Names};
use crate::object::probe::Probes;
use crate::object::{ObjectOptions, Store, Verdicts};
use crate::sys::sync::{Arc, Condvar, Mutex};
use crate::tier::health::Health;
use crate::tier::object::counters::ObjectCounters;
use crate::tier::object::epochs::Epochs;
use crate::tier::object::state::State;
use crate::tier::object::told::Told;
use crate::tier::surroundings::Surroundings;

pub(crate) use crate::tier::object::serve::ServedObjects;

/// Bytes of the unit in which closing looks again.
const CLOSE_SLICE: Duration = Duration::from_millis(20);

/// Where rows go: the client, the epoch, and what the server can do. Another one after each reset.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    store: Store,
    epoch: Epoch,
    conditional_put: bool,
    style: Style,
}

/// One open object tier.
pub(crate) struct ObjectTier {
    around: Surroundings,
    options: ObjectOptions,
    manifest: Manifest,
    digest: NamespaceDigest,
    row_bytes: BTreeMap<GroupId, usize>,
    /// For checksums of rows of these many bytes.
    shifts: BTreeMap<usize, Shift>,
    names: Names,
    probes: Probes,
    fingerprinter: Fingerprinter,
    verdicts: Verdicts,
    health: Health,
    counters: ObjectCounters,
    /// Names in listings that no object of ours has: left out.
    odd_names: Arc<Counter>,
    /// A client that a test gave.
    given: Option<Store>,
    handle: Handle,
    runtime: Mutex<Option<Runtime>>,
    state: Mutex<State>,
    told: Mutex<Told>,
    /// When the tier was opened.
    began: std::time::Instant,
    /// Tells that the state may have become quiet.
    quiet: Condvar,
    /// Wakes the keeper: another deadline, or the end.
    watch: Notify,
    /// Wakes whoever tries a failing server again.
    circuit: Notify,
    /// Wakes whoever lists.
    list: Notify,
    /// Tells that another object is being deleted, or none.
    deleted: Notify,
    /// True once nothing is to go on.
    stop: watch::Sender<bool>,
    /// Held by who resets.
    resetting: Mutex<()>,
}

impl fmt::Debug for ObjectTier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ObjectTier")
            .field("location", &self.options.location)
            .finish_non_exhaustive()
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        // Dropping a runtime waits for its threads, which this may be one of.
        if let Some(runtime) = crate::sys::sync::lock(&self.runtime).take() {
            runtime.shutdown_background();
        }
    }
}

impl ObjectTier {
    /// A tier for tasks, which must not keep it alive for ever.
    fn shared(self: &Arc<Self>) -> Arc<Self> {
        Arc::clone(self)
    }

    /// The epochs of the namespace, by a client that can do so much.
    fn epochs<'a>(&'a self, store: &'a Store, conditional_put: bool) -> Epochs<'a> {
        Epochs {
            store,
            names: &self.names,
            conditional_put,
            odd_names: &self.odd_names,
        }
    }
}
