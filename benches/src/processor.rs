//! Time of the processor.

#![expect(
    clippy::expect_used,
    reason = "a benchmark ends where its own numbers are wrong"
)]

use std::time::Duration;

/// Processor time of this thread so far: other programs do not count.
pub(crate) fn processor() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanoseconds = u32::try_from(now.tv_nsec).expect("below a second");
    Duration::new(u64::try_from(now.tv_sec).expect("positive"), nanoseconds)
}
