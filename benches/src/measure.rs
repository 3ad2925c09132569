//! Wall and processor time of a pass.

use std::time::Duration;

use kvstrata_core::sys::clock::{Clock, SystemClock};
use rustix::time::{ClockId, clock_gettime};

/// What a pass took.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Bytes moved.
    pub bytes: usize,
    /// Wall time.
    pub wall: Duration,
    /// Processor time of the whole process, user and system, workers of the kernel included.
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

/// Time used by all threads of the process so far.
fn processor_time() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(used.tv_sec).unwrap_or(0),
        u32::try_from(used.tv_nsec).unwrap_or(0),
    )
}
