//! Opening an object tier.

use core::time::Duration;
use std::collections::BTreeMap;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, watch};

use crate::error::{Error, ErrorKind, Result};
use crate::eviction::admission::Admission;
use crate::format::combined::Shift;
use crate::index::Fingerprinter;
use crate::metrics::count;
use crate::namespace::layout;
use crate::object::names::Names;
use crate::object::probe::Probes;
use crate::object::{Failure, FailureKind, ObjectOptions, Store, Verdicts};
use crate::sys::fs::fill_random;
use crate::sys::sync::{Arc, Condvar, Mutex, processors};
use crate::tier::health::Health;
use crate::tier::object::ObjectTier;
use crate::tier::object::counters::ObjectCounters;
use crate::tier::object::dispatch::Ended;
use crate::tier::object::state::State;
use crate::tier::object::told::Told;
use crate::tier::surroundings::Surroundings;

/// Most threads that move bytes.
const THREADS_MAX: usize = 4;
/// How long an engine that can do without the bucket waits for it at its start.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);

impl ObjectTier {
    /// Opens the tier. Where the bucket can be done without and cannot be used, it misses and
    /// tries again by itself.
    ///
    /// # Errors
    /// `Config`, naming the option, or saying what is wrong with the bucket.
    pub(crate) fn open(
        options: ObjectOptions,
        around: Surroundings,
        given: Option<Store>,
    ) -> Result<Arc<Self>> {
        let manifest = options.validate()?;
        let runtime = runtime()?;
        let base = options.location.below(&layout::directory_name(&manifest));
        let row_bytes: BTreeMap<_, _> = options
            .row_bytes
            .iter()
            .filter_map(|(group, bytes)| Some((*group, usize::try_from(*bytes).ok()?)))
            .collect();
        let shifts = row_bytes
            .values()
            .map(|bytes| (*bytes, Shift::over(count(*bytes))));
        let limits = options.limits;
        let [probe] = random().map_err(|failure| no_random(&failure))?;
        let began = around.clock.now();
        let tier = Arc::new(Self {
            digest: manifest.digest(),
            names: Names::new(base),
            probes: Probes::new(options.location.clone(), probe),
            fingerprinter: Fingerprinter::new(random().map_err(|f| no_random(&f))?),
            verdicts: Verdicts::new(began, limits.found_for, limits.absent_for),
            health: Health::new(around.circuit),
            counters: ObjectCounters::default(),
            odd_names: Arc::default(),
            handle: runtime.handle().clone(),
            runtime: Mutex::new(Some(runtime)),
            state: Mutex::new(State::new()),
            told: Mutex::new(Told::new(Admission::new(limits.admission, false))),
            began,
            quiet: Condvar::new(),
            watch: Notify::new(),
            circuit: Notify::new(),
            list: Notify::new(),
            deleted: Notify::new(),
            stop: watch::Sender::new(false),
            resetting: Mutex::default(),
            shifts: shifts.collect(),
            row_bytes,
            manifest,
            given,
            options,
            around,
        });
        tier.first_join()?;
        tier.handle.spawn(tier.shared().keep());
        tier.handle.spawn(tier.shared().try_again());
        tier.handle.spawn(tier.shared().list_all());
        Ok(tier)
    }

    fn first_join(self: &Arc<Self>) -> Result<()> {
        if self.options.required {
            let place = self.handle.block_on(self.join_now())?;
            let taken = self.handle.block_on(self.take_up(place));
            return taken.map_err(|failure| Error::config(failure.to_string()));
        }
        // Whether the first attempt goes on or not, the caller has waited long enough after this.
        let joining = self.handle.spawn(self.shared().join_later());
        let now = self.around.clock.now();
        let until = now.checked_add(FIRST_ATTEMPT).unwrap_or(now);
        let waited = self.handle.block_on(self.until(until, joining));
        drop::<Ended<_>>(waited);
        Ok(())
    }
}

fn runtime() -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(processors().clamp(1, THREADS_MAX))
        .thread_name("kvstrata-object")
        .enable_all()
        .build()
        .map_err(|error| {
            let text = "the object tier's threads cannot be started";
            Error::new(ErrorKind::Unavailable, text).with_source(error)
        })
}

/// Bytes from the operating system's random source.
pub(super) fn random<const N: usize>() -> core::result::Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    match fill_random(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(Failure::new(FailureKind::Other, error.to_string())),
    }
}

fn no_random(failure: &Failure) -> Error {
    Error::new(ErrorKind::Unavailable, failure.to_string())
}

/// A number from 0 to below 1, by chance.
pub(super) fn chance() -> f64 {
    let [low, high] = random::<2>().unwrap_or([0, 128]);
    f64::from(u16::from_le_bytes([low, high])) / 65_536.0
}
