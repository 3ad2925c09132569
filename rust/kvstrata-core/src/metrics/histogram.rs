//! How long things take: a histogram of durations in constant memory.

use core::time::Duration;

use serde_json::{Value, json};

use crate::metrics::Counter;
use crate::sys::sync::atomic::{AtomicU64, Ordering};

/// Parts into which each doubling of the duration is cut, as a power of two.
const PARTS_LOG2: u32 = 4;
const PARTS: u64 = 1 << PARTS_LOG2;
/// Doublings that are told apart: up to 2^40 us, twelve days.
const DOUBLINGS: u32 = 40;
/// Number of buckets.
const BUCKETS: usize = 592;
const _: () = assert!(BUCKETS.cast_signed() == bucket_of(u64::MAX).cast_signed() + 1);

/// Counts durations in buckets whose width grows with the duration, as HDR histograms do (Gil
/// Tene): one microsecond wide up to 16 us, then a sixteenth of the power of two below.
///
/// Units: microseconds inside, seconds outside. Error: a quantile is never below the duration that
/// it stands for, and above it by less than a sixteenth (6.25 %) plus 1 us. Memory: 4.7 KiB.
/// Recording is a few relaxed additions, on any thread, without a lock.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    sum_microseconds: Counter,
    max_microseconds: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum_microseconds: Counter::default(),
            max_microseconds: AtomicU64::new(0),
        }
    }
}

/// The bucket of a duration in microseconds.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a constant function; the number is below BUCKETS"
)]
const fn bucket_of(microseconds: u64) -> usize {
    let longest = (1 << DOUBLINGS) - 1;
    let value = if microseconds < longest {
        microseconds
    } else {
        longest
    };
    if value < PARTS {
        return value as usize;
    }
    let doubling = value.ilog2() - PARTS_LOG2;
    // The leading one and the bits that tell the part.
    let part = value >> doubling;
    (doubling as u64 * PARTS + part) as usize
}

/// The longest duration of a bucket, in microseconds.
fn longest_of(bucket: usize) -> u64 {
    let bucket = u64::try_from(bucket).unwrap_or(u64::MAX);
    if bucket < PARTS {
        return bucket;
    }
    let doubling = (bucket / PARTS).saturating_sub(1);
    let part = bucket.saturating_sub(doubling.saturating_mul(PARTS));
    let next = part.saturating_add(1);
    next.checked_shl(u32::try_from(doubling).unwrap_or(u32::MAX))
        .unwrap_or(u64::MAX)
        .saturating_sub(1)
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&self, duration: Duration) {
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get(bucket_of(microseconds)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_microseconds.add(microseconds);
        self.max_microseconds
            .fetch_max(microseconds, Ordering::Relaxed);
    }

    /// Number, sum, median, 99th percentile and maximum of all durations so far; zero where there
    /// are none. A quantile is the least duration that so many are not above (nearest rank).
    pub fn snapshot(&self) -> Value {
        let counts: Vec<u64> = self
            .buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
            .collect();
        let count = counts.iter().copied().fold(0_u64, u64::saturating_add);
        let longest = self.max_microseconds.load(Ordering::Relaxed);
        let seconds = |microseconds: u64| Duration::from_micros(microseconds).as_secs_f64();
        json!({
            "count": count,
            "sum_seconds": seconds(self.sum_microseconds.get()),
            "p50_seconds": seconds(quantile(&counts, count, 50).min(longest)),
            "p99_seconds": seconds(quantile(&counts, count, 99).min(longest)),
            "max_seconds": seconds(longest),
        })
    }
}

/// The upper end of the bucket that holds the duration of this rank.
fn quantile(counts: &[u64], count: u64, percent: u64) -> u64 {
    let rank = count.saturating_mul(percent).div_ceil(100);
    let mut seen = 0_u64;
    for (bucket, in_bucket) in counts.iter().enumerate() {
        seen = seen.saturating_add(*in_bucket);
        if seen >= rank && *in_bucket > 0 {
            return longest_of(bucket);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(durations: impl IntoIterator<Item = Duration>) -> Value {
        let histogram = Histogram::default();
        durations
            .into_iter()
            .for_each(|duration| histogram.record(duration));
        histogram.snapshot()
    }

    #[test]
    fn every_bucket_ends_where_the_next_begins() {
        for bucket in 0..BUCKETS - 1 {
            let longest = longest_of(bucket);
            assert_eq!(bucket_of(longest), bucket);
            assert_eq!(bucket_of(longest + 1), bucket + 1);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn nothing_recorded_is_zero() {
        let empty = of([]);
        for name in ["sum_seconds", "p50_seconds", "p99_seconds", "max_seconds"] {
            assert_eq!(empty[name], 0.0, "{name}");
        }
        assert_eq!(empty["count"], 0);
    }

    #[test]
    fn the_slowest_of_a_hundred_moves_the_99th_percentile_only_when_there_are_two() {
        let fast = Duration::from_micros(10);
        let slow = Duration::from_millis(50);
        let one = of((0..100).map(|at| if at == 0 { slow } else { fast }));
        assert_eq!(one["p99_seconds"], 0.000_01);
        assert_eq!(one["max_seconds"], 0.05);
        let two = of((0..100).map(|at| if at < 2 { slow } else { fast }));
        assert_eq!(two["p99_seconds"], 0.05);
        assert_eq!(two["p50_seconds"], 0.000_01);
        assert_eq!(two["count"], 100);
    }

    proptest! {
        #[test]
        fn quantiles_are_off_by_less_than_a_sixteenth_and_never_below(
            micros in prop::collection::vec(0_u64..1 << 39, 1..300),
        ) {
            let told = of(micros.iter().map(|one| Duration::from_micros(*one)));
            let mut sorted = micros.clone();
            sorted.sort_unstable();
            for (name, percent) in [("p50_seconds", 50), ("p99_seconds", 99)] {
                let rank = (sorted.len() * percent).div_ceil(100);
                let exact = Duration::from_micros(sorted[rank - 1]).as_secs_f64();
                let told = told[name].as_f64().unwrap();
                prop_assert!(told >= exact);
                prop_assert!(told <= exact * 1.0625 + 1e-6, "{name}: {told} for {exact}");
            }
        }
    }
}
