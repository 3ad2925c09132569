//! Rows under way: so many at a time, and none beyond its deadline.

use core::future::Future;
use core::panic::AssertUnwindSafe;
use core::pin::pin;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::{Either, select};
use tokio::time::{sleep_until, timeout_at};

use crate::io::Direction;
use crate::job::{JobKind, Outcome};
use crate::metrics::count;
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::object::ObjectTier;
use crate::tier::object::settle::End;
use crate::tier::object::state::Work;
use crate::tier::phase::Phase;
use crate::tier::request::Request;

/// What ended a wait.
pub(super) enum Ended<T> {
    /// What was waited for.
    Done(T),
    /// The deadline passed.
    Late,
    /// The tier closes.
    Stopped,
}

/// A row under way: whatever becomes of its task, its key gets an outcome.
struct UnderWay {
    tier: Arc<ObjectTier>,
    work: Work,
    end: Option<End>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let lost = || End::with(Outcome::IoError, "the request was lost");
        let end = self.end.take().unwrap_or_else(lost);
        self.tier.end_work(&self.work, end);
        self.tier.begin_deleting();
        self.tier.pump();
    }
}

impl ObjectTier {
    /// Waits for `work`, not beyond `deadline` nor the tier's end. Nothing of `work` goes on
    /// afterwards. Where it panics, it is as if no answer had come.
    pub(super) async fn until<T>(
        &self,
        deadline: Instant,
        work: impl Future<Output = T>,
    ) -> Ended<T> {
        let mut stop = self.stop.subscribe();
        let stopped = pin!(stop.wait_for(|stop| *stop));
        let work = timeout_at(deadline.into(), self.survive(work));
        match select(pin!(work), stopped).await {
            Either::Left((Ok(Some(done)), _)) => Ended::Done(done),
            Either::Left((Ok(None) | Err(_), _)) => Ended::Late,
            Either::Right(_) => Ended::Stopped,
        }
    }

    /// What `work` comes to; `None` where it panics, which ends nothing else.
    pub(super) async fn survive<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let done = AssertUnwindSafe(work).catch_unwind().await;
        if done.is_err() {
            self.around.metrics.errors.add(1);
            self.around.notices.say(Level::Error, "panic", || {
                "a request panicked; it counts as one without an answer".to_owned()
            });
        }
        done.ok()
    }

    /// Starts as many rows and questions as may run.
    pub(super) fn pump(self: &Arc<Self>) {
        let limits = &self.options.limits;
        let mut starting = Vec::new();
        let mut asking = Vec::new();
        let mut state = lock(&self.state);
        if state.phase != Phase::Open && state.phase != Phase::Closing {
            return;
        }
        while state.running < limits.requests_max
            && (state.running == 0 || state.running_bytes < limits.bytes_in_flight_max)
        {
            let Some(work) = state.next_work() else {
                break;
            };
            state.running = state.running.saturating_add(1);
            let row_bytes = count(work.item.row_bytes);
            state.running_bytes = state.running_bytes.saturating_add(row_bytes);
            starting.push(work);
        }
        if let Some(place) = state.serving().map(Arc::clone) {
            while state.questions < limits.questions_max
                && let Some(of) = state.to_ask.pop_front()
            {
                if let Some(asked) = state.asked.get_mut(&of) {
                    asked.under_way = true;
                    asking.push((of, asked.key, Arc::clone(&place)));
                    state.questions = state.questions.saturating_add(1);
                }
            }
        }
        drop(state);
        for work in starting {
            let under_way = UnderWay {
                tier: self.shared(),
                work,
                end: None,
            };
            self.handle.spawn(run(under_way));
        }
        for (of, key, place) in asking {
            self.handle.spawn(self.shared().ask(of, key, place));
        }
    }

    /// Ends jobs at their deadlines, as far as they have not started; runs until the tier stops.
    pub(super) async fn keep(self: Arc<Self>) {
        loop {
            let next = self.expire();
            let mut stop = self.stop.subscribe();
            let stopped = pin!(stop.wait_for(|stop| *stop));
            let woken = pin!(self.watch.notified());
            let until = pin!(async {
                match next {
                    Some(at) => sleep_until(at.into()).await,
                    None => core::future::pending().await,
                }
            });
            if let Either::Right(_) = select(select(woken, until), stopped).await {
                return;
            }
        }
    }

    /// Gives up what is past its deadline and has not started; says when to look again.
    fn expire(&self) -> Option<Instant> {
        let now = self.around.clock.now();
        let mut late: Vec<Arc<Request>> = Vec::new();
        let mut state = lock(&self.state);
        while let Some(front) = state.deadlines.front()
            && (front.is_done() || front.deadline <= now)
        {
            let front = state.deadlines.pop_front();
            late.extend(front.filter(|request| !request.is_done()));
        }
        let next = state.deadlines.front().map(|front| front.deadline);
        if !late.is_empty() {
            // In one pass: a pass for each job would take long with many jobs, under the lock.
            let rows = state.take_queued(|work| work.request.deadline <= now);
            let why = "not started by its deadline";
            self.settle_queued(&mut state, &rows, |_| Outcome::Timeout, why);
        }
        drop(state);
        for request in late {
            self.note_late(&request);
        }
        next
    }

    /// Counts a job that is past its deadline against the server, once.
    pub(super) fn note_late(&self, request: &Request) {
        if request.note_late() {
            let (direction, operation) = match request.kind {
                JobKind::Load => (Direction::Read, "get"),
                JobKind::Store => (Direction::Write, "put"),
            };
            let failure = crate::object::Failure::late();
            self.server_failed(direction, &failure, operation, "a row");
        }
    }
}

async fn run(mut under_way: UnderWay) {
    let tier = under_way.tier.shared();
    let work = under_way.work.clone();
    let end = match work.request.kind {
        JobKind::Load => tier.load_row(&work).await,
        JobKind::Store => tier.store_row(&work).await,
    };
    under_way.end = Some(end);
}
