//! A clock that stands still until it is moved.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvstrata_core::sys::clock::{Clock, SystemClock};

/// Starts at the time of its making, second 1,000,000,000 of the epoch. Sleeping moves it.
#[derive(Debug)]
pub struct ManualClock {
    start: Instant,
    elapsed: Mutex<Duration>,
}

impl Default for ManualClock {
    fn default() -> Self {
        Self {
            start: SystemClock.now(),
            elapsed: Mutex::default(),
        }
    }
}

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, duration: Duration) {
        *self.elapsed.lock().unwrap_or_else(PoisonError::into_inner) += duration;
    }

    fn elapsed(&self) -> Duration {
        *self.elapsed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + self.elapsed()
    }

    fn unix_seconds(&self) -> u32 {
        1_000_000_000 + u32::try_from(self.elapsed().as_secs()).unwrap_or(u32::MAX / 4)
    }

    fn sleep(&self, duration: Duration) {
        self.advance(duration);
    }
}
