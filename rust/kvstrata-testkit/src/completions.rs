//! A sink that collects, for tests that wait.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kvstrata_core::io::{Completion, CompletionSink};
use kvstrata_core::sys::clock::{Clock, SystemClock};

/// Completions in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub struct Completions {
    shared: Arc<(Mutex<Vec<Completion>>, Condvar)>,
}

impl Completions {
    /// The sink to give to an engine.
    pub fn sink(&self) -> CompletionSink {
        let shared = Arc::clone(&self.shared);
        Arc::new(move |completion| {
            let (arrived, change) = &*shared;
            arrived
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(completion);
            change.notify_all();
        })
    }

    /// Takes all completions as soon as there are at least `count`, or after `timeout`.
    pub fn wait(&self, count: usize, timeout: Duration) -> Vec<Completion> {
        let (arrived, change) = &*self.shared;
        let until = SystemClock.now() + timeout;
        let mut held = arrived.lock().unwrap_or_else(PoisonError::into_inner);
        while held.len() < count {
            let left = until.saturating_duration_since(SystemClock.now());
            if left.is_zero() {
                break;
            }
            let waited = change.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        core::mem::take(&mut *held)
    }
}
