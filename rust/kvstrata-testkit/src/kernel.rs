//! Kernels that stumble: what the calls of an engine answer, below the level of its operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvstrata_core::io::alter::{Alter, Answer};

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFault {
    /// It fails with this errno (positive), whatever the kernel has done.
    Errno(i32),
    /// It moves this many bytes at most; 0: none.
    Short(i32),
    /// Its answer comes this much later than the kernel's.
    Late(Duration),
    /// Its answer does not come while the test runs.
    Never,
}

impl CallFault {
    fn answer(self, truth: i32) -> Answer {
        match self {
            Self::Errno(errno) => errno.saturating_neg().into(),
            Self::Short(bytes) => truth.min(bytes).into(),
            Self::Late(after) => Answer {
                result: truth,
                after,
            },
            Self::Never => Answer {
                result: truth,
                after: Duration::from_hours(1),
            },
        }
    }
}

/// A kernel whose every call number `period` (the first of them is number `period - 1`) does this.
pub fn every(period: u64, fault: CallFault) -> Alter {
    let count = AtomicU64::new(0);
    Arc::new(move |_: &_, truth| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        if number % period == period - 1 {
            fault.answer(truth)
        } else {
            truth.into()
        }
    })
}

/// A kernel whose first calls do this, and no other.
pub fn first(calls: u64, fault: CallFault) -> Alter {
    let count = AtomicU64::new(0);
    Arc::new(move |_: &_, truth| {
        if count.fetch_add(1, Ordering::Relaxed) < calls {
            fault.answer(truth)
        } else {
            truth.into()
        }
    })
}

/// A kernel that answers in another order: each call between 0 and 7 ms late.
pub fn out_of_order() -> Alter {
    let state = AtomicU64::new(1);
    Arc::new(move |_: &_, truth| {
        // A full period generator: the order differs from run to run only by when calls come.
        let step = |state: u64| {
            Some(
                state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1),
            )
        };
        let drawn = state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        let late = drawn.unwrap_or(0) >> 61;
        CallFault::Late(Duration::from_millis(late)).answer(truth)
    })
}
