//! Removing rows from a bucket.

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvstrata_core::config::Size;
use kvstrata_core::error::{Error, ErrorKind};
use kvstrata_core::eviction::admission::AdmissionOptions;
use kvstrata_core::key::GroupId;
use kvstrata_core::object::gc::{GcOptions, run};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value, json};

use crate::arguments::{
    self as named, Capacity, Deferred, DryRun, Flag, Given, OlderThan, PositiveSeconds, Root,
    RowBytes, Seconds, SizeText, Text,
};
use crate::error::refused;
use crate::json::{self, Manifest};
use crate::open::{Common, ForBucket, memory};

/// Removes rows from a bucket: whole idle namespaces first, then the oldest rows.
///
/// * ``url``, ``endpoint``, ``region``, ``addressing``, ``allow_http``, ``ca_bundle``: as for
///   ``open_tier``, of a bucket.
/// * ``capacity``: bytes of rows to leave: ``"10GiB"`` or an int.
/// * ``older_than_s``: rows that were stored longer ago than so many seconds go.
/// * ``dry_run``: nothing is removed, the report is as if.
/// * ``deadline_s``: longest time of one request, or of all attempts at a page of a listing.
/// * ``time_limit_s``: longest time of all; what is not done by then is not.
///
/// Engines may go on meanwhile. Returns ``removed_rows``, ``removed_bytes``, ``failed_rows``,
/// ``last_error``, ``kept_rows``, ``kept_bytes``, ``emptied``: names of namespaces without rows,
/// ``odd_names``: objects that are nobody's, and ``ended``: ``"done"``, ``"time limit"`` or
/// ``"not listed to the end"``. Raises ``ConfigError`` (also a ``ValueError``) when it cannot; what
/// a signal's handler raises, such as ``KeyboardInterrupt``, has what was done so far as its
/// attribute ``report``.
#[pyfunction]
#[pyo3(
    signature = (
        url, *, capacity=Given::ABSENT, older_than_s=Given::ABSENT, dry_run=Deferred::of(false),
        deadline_s=Deferred::of(Duration::from_secs(30)), time_limit_s=Given::ABSENT, endpoint=Given::ABSENT, region=Given::ABSENT, addressing=Given::ABSENT,
        allow_http=Given::ABSENT, ca_bundle=Given::ABSENT,
    ) -> "dict[str, Any]",
    text_signature = "(url, *, capacity=..., older_than_s=..., dry_run=False, deadline_s=30.0, \
        time_limit_s=..., endpoint=..., region=..., addressing='auto', allow_http=False, \
        ca_bundle=...)"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "each has a name in Python, where they are keywords"
)]
pub(crate) fn collect_garbage(
    py: Python<'_>,
    url: Deferred<Root>,
    capacity: Given<SizeText<Capacity>>,
    older_than_s: Given<Seconds<OlderThan>>,
    dry_run: Deferred<Flag<DryRun>>,
    deadline_s: Deferred<PositiveSeconds<named::Deadline>>,
    time_limit_s: Given<Seconds<named::TimeLimit>>,
    endpoint: Given<Text<named::Endpoint>>,
    region: Given<Text<named::Region>>,
    addressing: Given<Text<named::Addressing>>,
    allow_http: Given<Flag<named::AllowHttp>>,
    ca_bundle: Given<Text<named::CaBundle>>,
) -> PyResult<Bound<'_, PyDict>> {
    let url = url.get()?;
    let what = What {
        capacity: capacity.get()?,
        older_than: older_than_s.get()?.map(|time| time.value),
        dry_run: dry_run.value()?,
        deadline: deadline_s.value()?,
        time_limit: time_limit_s.get()?.map(|time| time.value),
    };
    let bucket = ForBucket {
        endpoint: endpoint.get()?,
        region: region.get()?,
        addressing: addressing.get()?,
        allow_http: allow_http.get()?,
        ca_bundle: ca_bundle.get()?,
        ..ForBucket::default()
    };
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let interrupted = || {
        let Some(error) = Python::attach(|py| py.check_signals().err()) else {
            return false;
        };
        *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        true
    };
    let collected = py.detach(|| collect(url, what, bucket, &interrupted));
    let report = collected.map_err(|error| refused(py, &error))?;
    let report = json::dict(py, &report)?;
    let raised = raised.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(raised) = raised {
        raised.value(py).setattr("report", report)?;
        return Err(raised);
    }
    Ok(report)
}

/// What is asked for.
struct What {
    capacity: Option<SizeText<Capacity>>,
    older_than: Option<Duration>,
    dry_run: bool,
    deadline: Duration,
    time_limit: Option<Duration>,
}

fn collect(
    url: Root,
    what: What,
    bucket: ForBucket,
    interrupted: &dyn Fn() -> bool,
) -> Result<Map<String, Value>, Error> {
    let Root::Bucket(location) = url else {
        return Err(Error::config("url: a bucket is expected"));
    };
    let capacity_bytes = match what.capacity.map(|size| size.value) {
        Some(Size::Bytes(bytes)) => Some(bytes),
        Some(Size::Percent(_)) => {
            return Err(Error::config("capacity: a number of bytes is expected"));
        }
        None => None,
    };
    let asked = GcOptions {
        capacity_bytes,
        older_than: what.older_than,
        dry_run: what.dry_run,
        time_limit: what.time_limit,
    };
    if asked.capacity_bytes.is_none() && asked.older_than.is_none() {
        return Err(Error::config(
            "capacity: is missing, and so is older_than_s; give one",
        ));
    }
    // Nothing of a namespace is opened: these stand for any.
    let any = Common {
        manifest: Manifest(Map::from_iter([("model".to_owned(), "any".into())])),
        row_bytes: RowBytes(BTreeMap::from([(GroupId(0), 1)])),
        deadline: what.deadline,
        required: true,
        honours_busy: false,
        admission: AdmissionOptions::default(),
    };
    let given = memory(&location);
    let options = bucket.options(location, any)?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let report = run(&options, given.as_ref(), &clock, asked, interrupted)?;
    let told = json!({
        "removed_rows": report.removed_rows,
        "removed_bytes": report.removed_bytes,
        "failed_rows": report.failed_rows,
        "last_error": report.last_error,
        "kept_rows": report.kept_rows,
        "kept_bytes": report.kept_bytes,
        "emptied": report.emptied,
        "odd_names": report.odd_names,
        "ended": report.end.as_str(),
    });
    match told {
        Value::Object(told) => Ok(told),
        _ => Err(Error::new(ErrorKind::Data, "the report is no object")),
    }
}
