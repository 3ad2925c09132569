//! An object tier over a leaked arena, and the servers it is tried on.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::as_conversions,
    clippy::disallowed_methods,
    clippy::needless_pass_by_value,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "shared by several test programs, each of which uses a part"
)]

pub mod place;
pub mod s3s_server;
pub mod servers;
pub mod troubled;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::buffer::Arena;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::object::connect::{Style, connect};
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_core::object::options::Environment;
use kvstrata_core::object::{Addressing, Location, NamedFiles, ObjectOptions, Store};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::tier::{CircuitLimits, Seams, Tier};
use kvstrata_testkit::Bucket;
use kvstrata_testkit::memory::leaked_arena;

use crate::tier_support::{Harness, ROW_BYTES, identity};

/// Credentials that the servers of these tests take.
pub const ACCESS_KEY: &str = "AKIAKVSTRATATEST";
pub const SECRET_KEY: &str = "the-secret-of-these-tests";

/// How long a test waits for what has to happen in the end.
const PATIENCE: Duration = Duration::from_mins(1);

/// Options for a bucket named `bucket` on a server of this machine.
pub fn options(endpoint: &str) -> ObjectOptions {
    let environment = BTreeMap::from([
        ("AWS_ACCESS_KEY_ID".to_owned(), ACCESS_KEY.to_owned()),
        ("AWS_SECRET_ACCESS_KEY".to_owned(), SECRET_KEY.to_owned()),
    ]);
    ObjectOptions {
        location: Location::parse("s3://bucket/some/prefix").unwrap().unwrap(),
        identity: identity(),
        row_bytes: BTreeMap::from([
            (GroupId(0), ROW_BYTES as u64),
            (GroupId(7), ROW_BYTES as u64),
        ]),
        endpoint: Some(endpoint.to_owned()),
        region: Some("us-east-1".to_owned()),
        addressing: Addressing::Path,
        allow_http: true,
        ca_bundle: None,
        deadline: Duration::from_secs(20),
        required: true,
        environment: Environment(environment),
        files: NamedFiles::default(),
        // A busy machine may answer late: where that is no test's subject, it is waited for.
        limits: ObjectLimits {
            lookup_wait: PATIENCE,
            absent_for: PATIENCE,
            ..ObjectLimits::default()
        },
    }
}

/// A client of a server of this machine, beside those of tiers.
pub fn client(endpoint: &str) -> Store {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    connect(&options(endpoint), Style::Path, &clock, &Arc::default()).unwrap()
}

/// Options for a client that the test gives.
pub fn given_options() -> ObjectOptions {
    let mut options = options("http://127.0.0.1:1");
    options.location = Location::parse("memory://bucket/some/prefix")
        .unwrap()
        .unwrap();
    options.endpoint = None;
    options
}

pub fn open(options: ObjectOptions, slots: usize) -> Harness {
    listed(open_with(options, slots, None, CircuitLimits::default()))
}

pub fn open_given(store: &Store, slots: usize) -> Harness {
    let given = Some(Store::clone(store));
    listed(open_with(
        given_options(),
        slots,
        given,
        CircuitLimits::default(),
    ))
}

/// Opens a tier with a short deadline, which a busy machine may miss on the way, and a circuit that
/// never opens.
pub fn open_hasty(options: ObjectOptions, slots: usize) -> Harness {
    let arena = leaked_arena(slots * row_bytes(&options), 0).unwrap();
    open_hasty_in(options, arena)
}

/// [`open_hasty`] in memory that is there.
pub fn open_hasty_in(options: ObjectOptions, arena: Arc<Arena>) -> Harness {
    let patient = CircuitLimits {
        failures_max: u32::MAX,
        ..CircuitLimits::default()
    };
    let options = ObjectOptions {
        required: false,
        ..options
    };
    let harness = open_in(options, arena, None, patient);
    eventually("open", || harness.tier.stats().unwrap()["health"] == "ok");
    listed(harness)
}

/// The tier after its first listing, which else would begin whenever a busy machine gets round to
/// it, and tell of what the test has done by then.
pub fn listed(harness: Harness) -> Harness {
    eventually("listed, or in vain", || {
        let stats = harness.tier.stats().unwrap();
        let done = stats["complete_listings"].as_u64() > Some(0);
        done || stats["last_error"]["operation"] == "list"
    });
    harness
}

pub fn open_with(
    options: ObjectOptions,
    slots: usize,
    given: Option<Store>,
    circuit: CircuitLimits,
) -> Harness {
    let arena = leaked_arena(slots * row_bytes(&options), 0).unwrap();
    open_in(options, arena, given, circuit)
}

fn row_bytes(options: &ObjectOptions) -> usize {
    usize::try_from(*options.row_bytes.values().max().unwrap()).unwrap()
}

fn open_in(
    options: ObjectOptions,
    arena: Arc<Arena>,
    given: Option<Store>,
    circuit: CircuitLimits,
) -> Harness {
    let row_bytes = row_bytes(&options);
    let seams = Seams {
        circuit,
        ..Seams::default()
    };
    // The options' deadline may be a short one, and bounds the opening, too: a busy machine is let try
    // again.
    let until = Instant::now() + PATIENCE;
    let tier = loop {
        let arena = Arc::clone(&arena);
        match Tier::open_object_shared(options.clone(), arena, seams.clone(), given.clone()) {
            Ok(tier) => break tier,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
    };
    Harness::around(tier, arena, row_bytes)
}

/// What lookups say in the end: until every key has an answer.
pub fn found_in_the_end(harness: &Harness, keys: &[Key]) -> Vec<bool> {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = harness.tier.lookup(keys).unwrap();
        if found.iter().all(Option::is_some) {
            return found.into_iter().map(Option::unwrap).collect();
        }
        assert!(Instant::now() < until, "no answer: {found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a condition holds.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Names of the rows in a bucket.
pub fn row_names(bucket: &Bucket) -> Vec<String> {
    let names = bucket.names().into_iter();
    names.filter(|name| name.contains("/rows/")).collect()
}
