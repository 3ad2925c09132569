//! Closing a tier: admission ends, what runs ends, the rest is given up, the root is let go.

use core::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::job::Outcome;
use crate::sys::sync::{lock, wait_timeout};
use crate::tier::disk::DiskTier;
use crate::tier::phase::Phase;

impl DiskTier {
    /// Whether no operation may touch the arena any more; waits up to `timeout`.
    pub(crate) fn wait_quiet(&self, timeout: Duration) -> bool {
        self.around.jobs.wait_idle(timeout) && !self.arena_in_use()
    }

    /// Closes the tier within about `timeout`: calls are refused from now on, jobs may end, those
    /// not started by then are given up.
    ///
    /// # Errors
    /// `Busy` while the kernel still owns arena bytes; call again later.
    pub(crate) fn close(&self, timeout: Duration) -> Result<()> {
        let clock = &self.around.clock;
        let begun = clock.now();
        let left = || timeout.saturating_sub(clock.now().saturating_duration_since(begun));
        {
            let mut state = lock(&self.state);
            state.phase = state.phase.max(Phase::Closing);
        }
        self.around.jobs.wait_idle(left());
        self.give_up_queued();
        self.give_up_buffered_loads();
        let engine_ended = match self.engine() {
            Ok(engine) => engine.shutdown(left()),
            Err(_) => true,
        };
        if !engine_ended && self.arena_in_use() {
            return Err(busy());
        }
        if !self.stop_threads(left().max(Duration::from_secs(1))) {
            // A write of ours may still land: the root stays ours until the process ends.
            return Ok(());
        }
        if let Some(lease) = lock(&self.lease).take() {
            lease.release();
        }
        if let Some(root_lock) = lock(&self.root_lock).take() {
            // A child forked meanwhile has a copy of the descriptor: closing ours would not do.
            // Nothing else can fail here than an interrupted call, which is repeated.
            let _ = root_lock.unlock();
        }
        Ok(())
    }

    fn give_up_queued(&self) {
        let mut state = lock(&self.state);
        let queued: Vec<_> = state.queued.drain(..).collect();
        state.let_all_go();
        for store in queued {
            self.settle_rest(
                &mut state,
                &store.request,
                store.next,
                Outcome::Dropped,
                "closed",
            );
        }
    }

    /// Lets the writer write down what a restart should know, then joins both threads. A thread
    /// that hangs in the file system is left behind: it hands no more rows to the engine. Says whether
    /// both ended.
    fn stop_threads(&self, timeout: Duration) -> bool {
        let clock = &self.around.clock;
        let begun = clock.now();
        let mut state = lock(&self.state);
        state.phase = Phase::Stopping;
        self.work.notify_all();
        self.watch.notify_all();
        while !state.writer_done {
            let left = timeout.saturating_sub(clock.now().saturating_duration_since(begun));
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.done, state, left);
        }
        drop(state);
        let threads: Vec<_> = lock(&self.threads).drain(..).collect();
        for thread in threads {
            // The bodies catch their own panics.
            let _ = thread.join();
        }
        true
    }
}

fn busy() -> Error {
    let text = "bytes of the arena are still in use; close again later";
    Error::new(ErrorKind::Busy, text)
}
