//! The end of a step: what was wanted is queued, what is queued is started, and pins end.

use super::plan::key_of;
use super::requests::Asked;
use super::step_end::StepEnd;
use super::{Manager, Outside, RequestId};
use crate::cpu::CpuTier;

/// Part of the time a request may wait that a pause in its asking counts at most.
const AWAY_COUNTED: f64 = 0.1;

impl Manager {
    /// Ends a step. `now` are seconds of any clock that never goes back.
    pub fn end_step(&mut self, cpu: &mut CpuTier, now: f64, outside: &mut dyn Outside) -> StepEnd {
        let mut done = StepEnd::default();
        self.steps += 1;
        cpu.set_time(milliseconds(now));
        let asking = core::mem::take(&mut self.asking);
        for id in &asking {
            self.look_over(cpu, *id, now, outside);
        }
        if core::mem::take(&mut self.has_ended) {
            self.queue.prune(&self.requests);
        }
        // Pins last until here, so that no row that a request has found makes room for another.
        self.start(cpu, &mut done);
        self.tire(cpu, now, &mut done);
        if done.starts.is_empty() && self.queue.loading() == 0 && self.queue.queued() > 0 {
            self.unblock(cpu, &asking, &mut done);
        }
        for id in &asking {
            self.unpin(cpu, *id);
        }
        self.forget_strangers(cpu, &asking);
        done.evicted.extend(self.drop_refused(cpu));
        done
    }

    /// Queues what a request wants, or lets its rows go where it waits for nothing.
    fn look_over(&mut self, cpu: &mut CpuTier, id: RequestId, now: f64, outside: &mut dyn Outside) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        if !request.is_pending {
            if request.waits_since.is_some() || !request.holds.is_empty() {
                self.release_holds(cpu, id);
            }
            if let Some(request) = self.requests.get_mut(id) {
                self.has_ended |= request.waits_since.take().is_some();
            }
            return;
        }
        match &mut request.waits_since {
            None => {
                request.waits_since = Some(now);
                self.counters.waits += 1;
            }
            Some(since) if request.told_in + 1 < self.steps => {
                let away = now - request.told_at;
                *since += (away - self.options.wait_seconds * AWAY_COUNTED).max(0.0);
            }
            Some(_) => {}
        }
        (request.told_at, request.told_in) = (now, self.steps);
        if request.wanted.iter().any(|wanted| !wanted.queued) {
            self.plan(cpu, id, outside);
        }
    }

    /// Requests that have been told to wait for too long wait no more. Those that have not asked for
    /// as long let go what they hold: it is the engine that has no room for them, and when it has
    /// they may wait for their rows again.
    fn tire(&mut self, cpu: &mut CpuTier, now: f64, done: &mut StepEnd) {
        if self.requests.iter().all(|one| one.waits_since.is_none()) {
            return;
        }
        let most = self.options.wait_seconds;
        let mut late = self.requests.ids();
        late.retain(|id| {
            let request = self.requests.get(*id);
            request.is_some_and(|one| match one.waits_since {
                Some(since) if one.is_pending => now - since >= most,
                Some(_) => now - one.told_at >= most,
                None => false,
            })
        });
        for id in &late {
            let Some(request) = self.requests.get_mut(*id) else {
                continue;
            };
            request.waits_since = None;
            if request.is_pending {
                request.is_tired = true;
                self.counters.timed_out_waits += 1;
                let sample = request.asked.iter().find_map(|asked| match asked {
                    Asked::Writing(..) | Asked::Wanted(_) => key_of(cpu, request, *asked),
                    _ => None,
                });
                done.timed_out = done.timed_out.or(sample);
            }
            self.release_holds(cpu, *id);
        }
        if !late.is_empty() {
            self.queue.prune(&self.requests);
        }
    }

    /// Forgets requests that nobody began and that asked for nothing in this step.
    fn forget_strangers(&mut self, cpu: &mut CpuTier, asking: &[RequestId]) {
        if self.requests.iter().all(|one| one.is_known) {
            return;
        }
        for id in self.requests.ids() {
            let is_stranger = self.requests.get(id).is_some_and(|one| !one.is_known);
            if is_stranger && !asking.contains(&id) {
                self.end(cpu, id, None);
                self.forgotten.push(id);
            }
        }
    }
}

/// Time for the eviction policy.
pub(super) fn milliseconds(seconds: f64) -> u64 {
    let time = core::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
