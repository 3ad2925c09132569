//! Counters of a tier: atomic, monotonic, read as one snapshot.

pub mod histogram;

use core::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};

use crate::job::{JobKind, Outcome};
use crate::metrics::histogram::Histogram;

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A `usize` as a counter takes it.
pub(crate) fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// How many keys ended in each way.
#[derive(Debug, Default)]
struct OutcomeCounters([Counter; Outcome::ALL.len()]);

impl OutcomeCounters {
    fn count(&self, outcome: Outcome) {
        let found = Outcome::ALL
            .iter()
            .zip(&self.0)
            .find(|(of, _)| **of == outcome);
        if let Some((_, counter)) = found {
            counter.add(1);
        }
    }

    fn snapshot(&self) -> Value {
        Outcome::ALL
            .iter()
            .zip(&self.0)
            .map(|(of, counter)| (of.as_str().to_owned(), Value::from(counter.get())))
            .collect::<Map<_, _>>()
            .into()
    }
}

/// How long jobs and operations take, and how long they wait before.
#[derive(Debug, Default)]
pub struct Latencies {
    /// Loads: from the call to the last outcome.
    pub load: Histogram,
    /// Stores: from the call to the last outcome.
    pub store: Histogram,
    /// Stores: from the call until the writer thread begins to plan them.
    pub store_plan_wait: Histogram,
    /// Reads: from the tier's handing them to the engine to their start.
    pub read_wait: Histogram,
    /// Reads: from their start to their end.
    pub read: Histogram,
    /// Writes: from the tier's handing them to the engine to their start.
    pub write_wait: Histogram,
    /// Writes: from their start to their end.
    pub write: Histogram,
}

impl Latencies {
    fn snapshot(&self) -> Value {
        json!({
            "load": self.load.snapshot(),
            "store": self.store.snapshot(),
            "store_plan_wait": self.store_plan_wait.snapshot(),
            "read_wait": self.read_wait.snapshot(),
            "read": self.read.snapshot(),
            "write_wait": self.write_wait.snapshot(),
            "write": self.write.snapshot(),
        })
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Everything a tier counts over its life, in keys or bytes as named.
        #[derive(Debug, Default)]
        pub struct Metrics {
            store_outcomes: OutcomeCounters,
            load_outcomes: OutcomeCounters,
            /// How long things take.
            pub latency: Latencies,
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl Metrics {
            /// All counters under their names.
            pub fn snapshot(&self) -> Map<String, Value> {
                let mut all = Map::new();
                $(all.insert(stringify!($name).to_owned(), Value::from(self.$name.get()));)*
                all.insert("store_outcomes".to_owned(), self.store_outcomes.snapshot());
                all.insert("load_outcomes".to_owned(), self.load_outcomes.snapshot());
                all.insert("latency".to_owned(), self.latency.snapshot());
                all
            }
        }
    };
}

counters! {
    /// Keys of stores, in keys: the sum of their outcomes and of those without one yet.
    store_keys,
    /// Keys of loads, in keys: the sum of their outcomes and of those without one yet.
    load_keys,
    /// Payload bytes stored.
    bytes_stored,
    /// Payload bytes loaded and verified.
    bytes_loaded,
    /// Bytes handed to the device for rows, padding included.
    bytes_written,
    /// Rows whose key made room for another.
    evicted_rows,
    /// Row files given back, or taken from namespaces not in use.
    evicted_files,
    /// Rows found with bytes that were not those stored.
    corrupt_rows,
    /// The same, for rows written after the last clean mark and found bad after a crash.
    torn_rows,
    /// Rows set aside after a device error.
    retired_rows,
    /// Files and entries in the namespace that could not be used at open.
    junk,
    /// Files removed at open that an earlier process was making when it ended.
    leftovers,
    /// Row files that vanished or were cut while open.
    lost_files,
    /// Keys of loads that shared another load's read of their row.
    coalesced_loads,
    /// Keys of loads refused because too much was being loaded, or too many reads were stuck.
    refused_loads,
    /// Lookups asked, in keys.
    lookups,
    /// Lookups answered yes, in keys.
    lookup_hits,
    /// Times that a circuit opened: reads or writes were given up for a while.
    circuit_openings,
    /// Lookups answered no because reads were given up, in keys.
    circuit_missed_lookups,
    /// Loads that ended as misses because reads were given up, in keys.
    circuit_missed_loads,
    /// Stores dropped because writes were given up, in keys.
    circuit_dropped_stores,
    /// Keys of stores that were not taken: too unlikely to be used again, or too seldom asked for.
    unadmitted_stores,
    /// Errors that were logged, or would have been but for the rate limit.
    errors,
}

impl Metrics {
    /// Counts the keys of a job that was begun.
    pub fn offer(&self, kind: JobKind, keys: usize) {
        let counter = match kind {
            JobKind::Store => &self.store_keys,
            JobKind::Load => &self.load_keys,
        };
        counter.add(u64::try_from(keys).unwrap_or(u64::MAX));
    }

    /// Counts the end of one key.
    pub fn count(&self, kind: JobKind, outcome: Outcome) {
        match kind {
            JobKind::Store => self.store_outcomes.count(outcome),
            JobKind::Load => self.load_outcomes.count(outcome),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_is_counted_under_its_own_name() {
        let metrics = Metrics::default();
        for outcome in Outcome::ALL {
            metrics.count(JobKind::Store, outcome);
        }
        metrics.count(JobKind::Load, Outcome::Miss);
        let all = metrics.snapshot();
        for outcome in Outcome::ALL {
            assert_eq!(all["store_outcomes"][outcome.as_str()], 1);
        }
        assert_eq!(all["load_outcomes"]["miss"], 1);
        assert_eq!(all["load_outcomes"]["ok"], 0);
    }
}
