//! Time, behind a trait so that a test can turn the hands.

use core::fmt::Debug;
use core::time::Duration;
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Where deadlines, access times and pauses come from.
pub trait Clock: Send + Sync + Debug {
    /// The monotonic time; deadlines are compared with it.
    fn now(&self) -> Instant;

    /// Wall-clock time in whole seconds since 1970-01-01 UTC; before it 0, after the year 2106
    /// `u32::MAX`. Only good as a coarse access time: it may jump either way.
    fn unix_seconds(&self) -> u32;

    /// Blocks the calling thread for `duration`.
    fn sleep(&self, duration: Duration);
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "the seam every other module goes through"
    )]
    fn now(&self) -> Instant {
        Instant::now()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the seam every other module goes through"
    )]
    fn unix_seconds(&self) -> u32 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| {
                u32::try_from(elapsed.as_secs()).unwrap_or(u32::MAX)
            })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the seam every other module goes through"
    )]
    fn sleep(&self, duration: Duration) {
        thread::sleep(duration);
    }
}
