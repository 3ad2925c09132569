//! Wall and processor time of a pass.

use std::time::Duration;

use kvstrata_core::sys::clock::{Clock, SystemClock};

/// What a pass took.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Bytes moved.
    pub bytes: usize,
    /// Wall time.
    pub wall: Duration,
    /// Processor time of the whole process, user and system, to 10 ms.
    pub processor: Duration,
}

impl Pass {
    /// Times `body`, which moves `bytes`.
    pub fn of(bytes: usize, body: impl FnOnce()) -> Self {
        let (start, used) = (SystemClock.now(), processor_time());
        body();
        let wall = SystemClock.now().saturating_duration_since(start);
        Self {
            bytes,
            wall,
            processor: processor_time().saturating_sub(used),
        }
    }

    /// Bytes per nanosecond, which is GB/s.
    #[expect(
        clippy::as_conversions,
        clippy::cast_precision_loss,
        reason = "a figure with three digits"
    )]
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.wall.as_secs_f64()
    }

    /// Processor seconds for each GB.
    #[expect(
        clippy::as_conversions,
        clippy::cast_precision_loss,
        reason = "a figure with three digits"
    )]
    pub fn processor_per_gigabyte(&self) -> f64 {
        self.processor.as_secs_f64() / (self.bytes as f64 / 1e9)
    }
}

/// The pass in the middle by throughput, and the lowest and highest GB/s.
pub fn median(mut passes: Vec<Pass>) -> Option<(Pass, f64, f64)> {
    passes.sort_by(|one, other| {
        one.gigabytes_per_second()
            .total_cmp(&other.gigabytes_per_second())
    });
    let middle = *passes.get(passes.len() / 2)?;
    let low = passes.first()?.gigabytes_per_second();
    Some((middle, low, passes.last()?.gigabytes_per_second()))
}

/// Time used by all threads so far, from `/proc/self/stat` (ticks of 10 ms).
#[expect(
    clippy::disallowed_methods,
    reason = "what the kernel says of the process"
)]
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks = |position: usize| {
        fields
            .split(' ')
            .nth(position)
            .and_then(|field| field.parse::<u64>().ok())
            .unwrap_or(0)
    };
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}
