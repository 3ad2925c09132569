//! `open_tier`: one function for every kind of tier.

use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use kvstrata_core::buffer::Arena;
use kvstrata_core::config::{Size, TierOptions};
use kvstrata_core::error::{Error, Result};
use kvstrata_core::eviction::admission::AdmissionOptions;
use kvstrata_core::object::limits::ObjectLimits;
use kvstrata_core::object::{
    Addressing, Location, NamedFiles, ObjectOptions, Scheme, Store, memory_store,
};
use kvstrata_core::tier::{self, Seams};
use pyo3::prelude::*;

use crate::arena::ArenaBuffer;
use crate::arguments::{
    self as named, Capacity, Count, Deadline, Deferred, Flag, Given, HonoursBusy, MinFree, Policy,
    PositiveSeconds, Probability, Required, Root, RowBytes, Seconds, SizeText, Text,
};
use crate::environment;
use crate::error::refused;
use crate::handle::Handle;
use crate::json::Manifest;
use crate::notices;
use crate::tier::Tier;

/// The stores of `memory://NAME`, for as long as the process lives.
static MEMORY: Mutex<BTreeMap<String, Store>> = Mutex::new(BTreeMap::new());

/// What every kind of tier is opened with.
pub(crate) struct Common {
    pub(crate) manifest: Manifest,
    pub(crate) row_bytes: RowBytes,
    pub(crate) deadline: Duration,
    pub(crate) required: bool,
    pub(crate) honours_busy: bool,
    pub(crate) admission: AdmissionOptions,
}

/// Least probability of a use within an hour of what a tier takes, where nothing else is said.
const THETA: f32 = 0.05;

/// Which rows a tier takes, as it was given.
///
/// # Errors
/// The refusal of an argument.
pub(crate) fn admission(
    theta: Given<Probability<named::Theta>>,
    store_threshold: Given<Count<named::StoreThreshold>>,
    tracked_keys: Given<Count<named::TrackedKeys>>,
    directory: Given<Count<named::Directory>>,
    theta_default: f32,
) -> PyResult<AdmissionOptions> {
    let own = AdmissionOptions::default();
    let threshold = store_threshold.get()?.map(|count| count.value);
    Ok(AdmissionOptions {
        theta: theta.get()?.map_or(theta_default, |theta| theta.value),
        store_threshold: threshold.map_or(own.store_threshold, |count| {
            u32::try_from(count).unwrap_or(u32::MAX)
        }),
        tracked_keys: tracked_keys
            .get()?
            .map_or(own.tracked_keys, |count| count.value),
        directory: directory.get()?.map(|count| count.value),
    })
}

/// What only directories take.
struct ForDirectory {
    capacity: Option<SizeText<Capacity>>,
    min_free: Option<SizeText<MinFree>>,
    policy: Option<Text<Policy>>,
    io_backend: Option<Text<named::IoBackend>>,
    share_mode: Option<Text<named::ShareMode>>,
}

/// What only buckets take.
#[derive(Default)]
pub(crate) struct ForBucket {
    pub(crate) endpoint: Option<Text<named::Endpoint>>,
    pub(crate) region: Option<Text<named::Region>>,
    pub(crate) addressing: Option<Text<named::Addressing>>,
    pub(crate) allow_http: Option<Flag<named::AllowHttp>>,
    pub(crate) ca_bundle: Option<Text<named::CaBundle>>,
    pub(crate) requests_max: Option<Count<named::RequestsMax>>,
    pub(crate) in_flight_max: Option<SizeText<named::InFlightMax>>,
    pub(crate) lookup_wait_s: Option<Seconds<named::LookupWait>>,
    pub(crate) found_s: Option<Seconds<named::FoundFor>>,
    pub(crate) absent_s: Option<Seconds<named::AbsentFor>>,
}

fn misplaced(name: &str, given: bool, what: &str) -> Result<()> {
    if given {
        Err(Error::config(format!("{name}: {what}")))
    } else {
        Ok(())
    }
}

impl ForDirectory {
    fn refuse(&self) -> Result<()> {
        let what = "is for file:// alone; what a bucket holds is bounded by its lifecycle rules";
        misplaced("capacity", self.capacity.is_some(), what)?;
        misplaced("min_free", self.min_free.is_some(), what)?;
        misplaced("policy", self.policy.is_some(), what)?;
        misplaced(
            "io_backend",
            self.io_backend.is_some(),
            "is for file:// alone",
        )?;
        misplaced(
            "share_mode",
            self.share_mode.is_some(),
            "is for file:// alone",
        )
    }

    fn options(self, root: PathBuf, common: Common) -> Result<TierOptions> {
        let missing = || Error::config("capacity: is missing; file:// needs a hard limit");
        let text = |given: Option<String>, default: &str| given.unwrap_or_else(|| default.into());
        Ok(TierOptions {
            root,
            identity: common.manifest.0,
            row_bytes: common.row_bytes.0,
            capacity: self.capacity.map(|size| size.value).ok_or_else(missing)?,
            min_free: self.min_free.map_or(Size::Percent(5.0), |size| size.value),
            policy: text(self.policy.map(|text| text.value), "lru"),
            directory: common.admission.directory,
            admission: common.admission,
            io_backend: text(self.io_backend.map(|text| text.value), "auto"),
            deadline: common.deadline,
            share_mode: text(self.share_mode.map(|text| text.value), "private"),
            required: common.required,
            honours_busy: common.honours_busy,
        })
    }
}

impl ForBucket {
    fn refuse(&self) -> Result<()> {
        let what = "is for buckets (s3://, gs://, az://) alone";
        misplaced("endpoint", self.endpoint.is_some(), what)?;
        misplaced("region", self.region.is_some(), what)?;
        misplaced("addressing", self.addressing.is_some(), what)?;
        misplaced("allow_http", self.allow_http.is_some(), what)?;
        misplaced("ca_bundle", self.ca_bundle.is_some(), what)?;
        misplaced("requests_max", self.requests_max.is_some(), what)?;
        misplaced("in_flight_max", self.in_flight_max.is_some(), what)?;
        misplaced("lookup_wait_s", self.lookup_wait_s.is_some(), what)?;
        misplaced("found_s", self.found_s.is_some(), what)?;
        misplaced("absent_s", self.absent_s.is_some(), what)
    }

    pub(crate) fn options(self, location: Location, common: Common) -> Result<ObjectOptions> {
        let addressing = self.addressing.map(|text| Addressing::parse(&text.value));
        let own = ObjectLimits::default();
        let in_flight = match self.in_flight_max.map(|size| size.value) {
            Some(Size::Bytes(bytes)) => bytes,
            Some(Size::Percent(_)) => {
                return Err(Error::config(
                    "in_flight_max: a number of bytes is expected",
                ));
            }
            None => own.bytes_in_flight_max,
        };
        let limits = ObjectLimits {
            requests_max: self
                .requests_max
                .map_or(own.requests_max, |count| count.value),
            bytes_in_flight_max: in_flight,
            lookup_wait: self
                .lookup_wait_s
                .map_or(own.lookup_wait, |time| time.value),
            found_for: self.found_s.map_or(own.found_for, |time| time.value),
            absent_for: self.absent_s.map_or(own.absent_for, |time| time.value),
            admission: common.admission,
            ..own
        };
        Ok(ObjectOptions {
            location,
            identity: common.manifest.0,
            row_bytes: common.row_bytes.0,
            endpoint: self.endpoint.map(|text| text.value),
            region: self.region.map(|text| text.value),
            addressing: addressing.transpose()?.unwrap_or(Addressing::Auto),
            allow_http: self.allow_http.is_some_and(|flag| flag.value),
            ca_bundle: self.ca_bundle.map(|text| PathBuf::from(text.value)),
            deadline: common.deadline,
            required: common.required,
            environment: environment::read(),
            files: NamedFiles::default(),
            limits,
        })
    }
}

/// The store of `memory://NAME`: the same one each time.
pub(crate) fn memory(location: &Location) -> Option<Store> {
    (location.scheme == Scheme::Memory).then(|| {
        let mut all = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
        let store = all
            .entry(location.bucket.clone())
            .or_insert_with(memory_store);
        Store::clone(store)
    })
}

fn open(
    url: Root,
    common: Common,
    directory: ForDirectory,
    bucket: ForBucket,
    arena: Arena,
) -> Result<tier::Tier> {
    match url {
        Root::Directory(root) => {
            bucket.refuse()?;
            tier::Tier::open(directory.options(root, common)?, arena)
        }
        Root::Bucket(location) => {
            directory.refuse()?;
            let given = memory(&location);
            let options = bucket.options(location, common)?;
            tier::Tier::open_object_shared(options, arena.into(), Seams::default(), given)
        }
    }
}

/// Opens a tier on a directory or a bucket.
///
/// * ``url``: ``file:///var/kv`` or a path: the directory is created if it is missing.
///   ``s3://bucket/prefix``, ``gs://...``, ``az://...``: a bucket that exists. ``memory://name``:
///   objects in this process, for tests.
/// * ``manifest``: identity fields, any JSON values. ``"model"`` (str, required) names the
///   directory. Format version, group ids and ``row_bytes`` are added. Rows are only ever shared
///   between tiers whose whole manifests are equal.
/// * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
/// * ``arena``: writable, C-contiguous buffer that holds the slots, one row of each group at least.
///   The tier keeps it until it is closed: until then it can be neither freed nor resized.
/// * ``deadline_s``: seconds after which an operation counts as failed; 30.0.
/// * ``required``: False gives, where the directory or bucket cannot be used, a tier that misses
///   and retries by itself.
/// * ``honours_busy``: False: a result comes only when every operation on the job's slots has
///   ended; on a mount whose calls can hang, loads go through buffers, so that they end at their
///   deadline all the same. True: a load may end at its deadline with ``busy`` positions, and the
///   caller does not reuse those slots while ``busy_offsets()`` names them.
/// * ``theta``: rows that are less likely than that to be used again within an hour are not stored;
///   0.05. Nothing is known before requests were observed, and then everything is stored.
///   ``store_threshold``: requests that must have had a key before its row is stored; 1. It is
///   counted for ``tracked_keys`` keys; 64,000. Such stores end as ``"dropped"``.
/// * ``directory``: keys that what predicts this knows at most, however old; else those of the last
///   hour, up to 4,194,304 or, with the policy ``"th"``, eight for each row.
///
/// For directories alone:
///
/// * ``capacity`` (required): bytes the tier may use: ``"10GiB"``, ``"80%"`` of the file system,
///   or an int.
/// * ``min_free``: bytes to leave free on the file system, in the same forms; ``"5%"``.
/// * ``policy``: which rows go first when space is needed: ``"lru"``, ``"th"``, ``"arc_vllm"``,
///   ``"s3fifo"``; docs/EVICTION.md defines them.
/// * ``io_backend``: ``"auto"``, ``"threads"`` or ``"uring"``.
/// * ``share_mode``: ``"private"``: only this user can read the rows.
///
/// For buckets alone (credentials come from the environment, a credentials file or the instance):
///
/// * ``endpoint``: ``http://host:port`` or ``https://host:port`` of a server that is not the
///   provider's own. ``allow_http``: whether plain HTTP is fine. ``ca_bundle``: a file of PEM
///   certificates to trust beside the system's.
/// * ``region``: the environment's, or ``"us-east-1"``.
/// * ``addressing``: ``"path"``, ``"virtual"`` or ``"auto"``: with an endpoint, path if that works.
/// * ``requests_max``: requests for rows at a time; 32. ``in_flight_max``: their bytes; 256 MiB.
/// * ``lookup_wait_s``: seconds for which a lookup says "not known yet" before it says no; 2.0.
///   ``found_s``, ``absent_s``: seconds for which it is believed that a row is there, or is not;
///   600.0 and 15.0.
///
/// Raises ``ConfigError`` (also a ``ValueError``), which names the argument, path or field.
#[pyfunction]
#[pyo3(
    signature = (
        url, *, manifest, row_bytes, arena, capacity=Given::ABSENT, min_free=Given::ABSENT,
        policy=Given::ABSENT, io_backend=Given::ABSENT,
        deadline_s=Deferred::of(Duration::from_secs(30)), share_mode=Given::ABSENT,
        required=Deferred::of(true), honours_busy=Deferred::of(false),
        theta=Given::ABSENT, store_threshold=Given::ABSENT, tracked_keys=Given::ABSENT,
        directory=Given::ABSENT, endpoint=Given::ABSENT, region=Given::ABSENT, addressing=Given::ABSENT,
        allow_http=Given::ABSENT, ca_bundle=Given::ABSENT, requests_max=Given::ABSENT,
        in_flight_max=Given::ABSENT, lookup_wait_s=Given::ABSENT, found_s=Given::ABSENT,
        absent_s=Given::ABSENT,
    ),
    text_signature = "(url, *, manifest, row_bytes, arena, capacity=..., min_free='5%', policy='lru', \
        io_backend='auto', deadline_s=30.0, share_mode='private', required=True, honours_busy=False, \
        theta=0.05, store_threshold=1, tracked_keys=64000, directory=..., endpoint=..., region=..., addressing='auto', allow_http=False, ca_bundle=..., requests_max=32, \
        in_flight_max='256MiB', lookup_wait_s=2.0, found_s=600.0, absent_s=15.0)"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "each has a name in Python, where they are keywords"
)]
pub(crate) fn open_tier(
    py: Python<'_>,
    url: Deferred<Root>,
    manifest: Deferred<Manifest>,
    row_bytes: Deferred<RowBytes>,
    arena: Deferred<ArenaBuffer>,
    capacity: Given<SizeText<Capacity>>,
    min_free: Given<SizeText<MinFree>>,
    policy: Given<Text<Policy>>,
    io_backend: Given<Text<named::IoBackend>>,
    deadline_s: Deferred<PositiveSeconds<Deadline>>,
    share_mode: Given<Text<named::ShareMode>>,
    required: Deferred<Flag<Required>>,
    honours_busy: Deferred<Flag<HonoursBusy>>,
    theta: Given<Probability<named::Theta>>,
    store_threshold: Given<Count<named::StoreThreshold>>,
    tracked_keys: Given<Count<named::TrackedKeys>>,
    directory: Given<Count<named::Directory>>,
    endpoint: Given<Text<named::Endpoint>>,
    region: Given<Text<named::Region>>,
    addressing: Given<Text<named::Addressing>>,
    allow_http: Given<Flag<named::AllowHttp>>,
    ca_bundle: Given<Text<named::CaBundle>>,
    requests_max: Given<Count<named::RequestsMax>>,
    in_flight_max: Given<SizeText<named::InFlightMax>>,
    lookup_wait_s: Given<Seconds<named::LookupWait>>,
    found_s: Given<Seconds<named::FoundFor>>,
    absent_s: Given<Seconds<named::AbsentFor>>,
) -> PyResult<Tier> {
    let url = url.get()?;
    let common = Common {
        manifest: manifest.get()?,
        row_bytes: row_bytes.get()?,
        deadline: deadline_s.value()?,
        required: required.value()?,
        honours_busy: honours_busy.value()?,
        admission: admission(theta, store_threshold, tracked_keys, directory, THETA)?,
    };
    let on_disk = ForDirectory {
        capacity: capacity.get()?,
        min_free: min_free.get()?,
        policy: policy.get()?,
        io_backend: io_backend.get()?,
        share_mode: share_mode.get()?,
    };
    let bucket = ForBucket {
        endpoint: endpoint.get()?,
        region: region.get()?,
        addressing: addressing.get()?,
        allow_http: allow_http.get()?,
        ca_bundle: ca_bundle.get()?,
        requests_max: requests_max.get()?,
        in_flight_max: in_flight_max.get()?,
        lookup_wait_s: lookup_wait_s.get()?,
        found_s: found_s.get()?,
        absent_s: absent_s.get()?,
    };
    let (arena, buffer) = arena.get()?.split();
    let opened = py.detach(|| {
        open(url, common, on_disk, bucket, arena).map(|tier| {
            let notices = tier.take_notices();
            (tier, notices)
        })
    });
    let (tier, notices) = opened.map_err(|error| refused(py, &error))?;
    let handle = Handle::new(tier, buffer);
    notices::log(py, notices);
    Ok(Tier { handle })
}
