//! The end of a step: what was wanted is queued, what is queued is started, and pins end.

use super::requests::{Asked, Request};
use super::span::{self, Item};
use super::{Manager, Outside, RequestId};
use crate::cpu::{CpuTier, Handle, User};
use crate::key::{GroupId, Key};

/// Rows to be loaded from one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The tier's number.
    pub tier: usize,
    /// The rows.
    pub keys: Vec<Key>,
    /// First byte of each row's slot.
    pub offsets: Vec<u64>,
    /// The use of each slot.
    pub handles: Vec<Handle>,
}

/// Part of the time a request may wait that a pause in its asking counts at most.
const AWAY_COUNTED: f64 = 0.1;

/// What came of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepEnd {
    /// Loads to be started, one per tier.
    pub starts: Vec<Start>,
    /// Keys whose rows made room, or were refused and nobody uses them any more.
    pub evicted: Vec<Key>,
    /// A key that a request has waited for too long, if any.
    pub timed_out: Option<Key>,
}

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

    fn plan(&mut self, cpu: &CpuTier, id: RequestId, outside: &mut dyn Outside) {
        let Some(request) = self.requests.get(id) else {
            return;
        };
        let keys: Vec<Option<Key>> = request
            .asked
            .iter()
            .map(|asked| key_of(cpu, request, *asked))
            .collect();
        let items: Vec<Item> = request
            .asked
            .iter()
            .zip(&keys)
            .map(|(asked, key)| item(id, *asked, key.as_ref(), outside))
            .collect();
        let tokens = &self.options.tokens;
        let step = |group: GroupId| {
            let found = tokens.iter().find(|(other, _)| *other == group);
            found.map(|(_, tokens)| *tokens)
        };
        let span = span::agreed(&items, &step);
        let limit = self.cut(cpu, &items, &keys, &span);
        let wanted_of = |at: &usize| match request.asked.get(*at) {
            Some(Asked::Wanted(number)) => usize::try_from(*number).ok(),
            _ => None,
        };
        let below = |at: &&usize| {
            limit.is_none_or(|limit| {
                let end = items.get(**at).and_then(|item| item.position);
                end.is_some_and(|end| end <= limit)
            })
        };
        let mut chosen: Vec<usize> = span
            .members
            .iter()
            .filter(below)
            .filter_map(wanted_of)
            .collect();
        let underway = request.wanted.iter().any(|wanted| wanted.queued)
            || request
                .asked
                .iter()
                .any(|one| matches!(one, Asked::Writing(..)));
        let fresh = chosen
            .iter()
            .any(|number| request.wanted.get(*number).is_some_and(|one| !one.queued));
        if !fresh && !underway && limit.is_none() {
            // Nobody knows what the scheduler is after; without a row it would wait in vain.
            chosen = (0..request.wanted.len()).collect();
        }
        self.enqueue(cpu, id, &chosen, limit);
    }

    /// The token behind which a request's rows have no room; `None` where all fit.
    fn cut(
        &self,
        cpu: &CpuTier,
        items: &[Item],
        keys: &[Option<Key>],
        span: &span::Span,
    ) -> Option<u64> {
        let budget = share_of(cpu.arena_bytes(), self.options.request_share);
        let bytes = |at: &usize| {
            let key = keys.get(*at).and_then(Option::as_ref);
            key.and_then(|key| cpu.slot_bytes(key)).unwrap_or(0)
        };
        let whole: u64 = span.members.iter().map(bytes).sum();
        if whole <= budget {
            return None;
        }
        let windows: u64 = span.windows.iter().map(bytes).sum();
        let mut left = budget.saturating_sub(windows);
        let mut rows: Vec<(u64, u64)> = span
            .members
            .iter()
            .filter(|at| !span.windows.contains(at))
            .filter_map(|at| Some((items.get(*at)?.position?, bytes(at))))
            .collect();
        rows.sort_unstable();
        let mut limit = 0;
        for chunk in rows.chunk_by(|one, other| one.0 == other.0) {
            let size: u64 = chunk.iter().map(|(_, bytes)| *bytes).sum();
            if size > left {
                break;
            }
            left -= size;
            limit = chunk.first().map_or(limit, |(end, _)| *end);
        }
        Some(limit)
    }

    fn enqueue(&mut self, cpu: &CpuTier, id: RequestId, chosen: &[usize], limit: Option<u64>) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        if let Some(limit) = limit {
            if request.limit.is_none() {
                self.counters.cut_spans += 1;
            }
            request.limit = Some(request.limit.map_or(limit, |old| old.min(limit)));
        }
        for number in chosen {
            let Some(wanted) = request.wanted.get(*number).filter(|one| !one.queued) else {
                continue;
            };
            if let Some(row) = self.queue.get_mut(&wanted.key) {
                row.add(id);
                continue;
            }
            // A key without a slot of its own is of no group that is kept here.
            if let Some(bytes) = cpu.slot_bytes(&wanted.key) {
                self.queue.push(wanted.key, wanted.tier, bytes, id);
                self.counters.wanted_rows += 1;
            }
        }
    }

    /// Starts as many queued rows as their share allows and as there is room for.
    fn start(&mut self, cpu: &mut CpuTier, done: &mut StepEnd) {
        let most = share_of(cpu.arena_bytes(), self.options.share);
        let mut taken = self.queue.loading_bytes() + self.held_bytes;
        let mut batch: Vec<(Key, usize)> = Vec::new();
        while let Some((key, tier, bytes)) = self.queue.next(&self.requests) {
            if taken > 0 && taken.saturating_add(bytes) > most {
                self.queue.put_back(&[key]);
                // Else requests that have half of their rows each would wait for each other.
                if let Some(first) = self.first_in_line() {
                    batch.extend(self.queue.take_for(first));
                }
                break;
            }
            taken = taken.saturating_add(bytes);
            batch.push((key, tier));
        }
        self.start_batch(cpu, &batch, done);
    }

    /// The oldest of the requests that wait, if it has queued rows: they come whatever others hold.
    fn first_in_line(&self) -> Option<RequestId> {
        let first = self.waiting().into_iter().next()?;
        self.queue.has_for(first).then_some(first)
    }

    /// Requests that wait, the oldest first.
    fn waiting(&self) -> Vec<RequestId> {
        let is_waiting = |id: &RequestId| self.requests.get(*id).is_some_and(Request::is_waiting);
        self.requests.ids().into_iter().filter(is_waiting).collect()
    }

    /// Rows are queued, and none of them found room, nor is any on its way whose end would make
    /// some. What others have found or hold, or is kept for them, goes for the first in line, the last
    /// in line's first; else all of them would wait for each other.
    fn unblock(&mut self, cpu: &mut CpuTier, asking: &[RequestId], done: &mut StepEnd) {
        let Some(first) = self.first_in_line() else {
            return;
        };
        for id in asking.iter().filter(|id| **id != first) {
            self.unpin(cpu, *id);
        }
        let mut others = self.waiting();
        others.retain(|id| *id != first);
        loop {
            let batch = self.queue.take_for(first);
            self.start_batch(cpu, &batch, done);
            if !done.starts.is_empty() {
                return;
            }
            if cpu.give_up_last() {
                continue;
            }
            let Some(last) = others.pop() else {
                return;
            };
            self.release_holds(cpu, last);
        }
    }

    /// Gives slots to the first rows of a batch, as many as find room; the others stay queued.
    fn start_batch(&mut self, cpu: &mut CpuTier, batch: &[(Key, usize)], done: &mut StepEnd) {
        let mut rest = batch;
        let mut size = rest.len();
        while size > 0 {
            let (part, behind) = rest.split_at(size.min(rest.len()));
            if part.is_empty() {
                return;
            }
            if self.start_all(cpu, part, done) {
                rest = behind;
            } else {
                size /= 2;
            }
        }
        let left: Vec<Key> = rest.iter().map(|(key, _)| *key).collect();
        self.queue.put_back(&left);
    }

    /// Gives slots to rows; `false` where there is no room for all, and nothing has changed.
    fn start_all(&mut self, cpu: &mut CpuTier, part: &[(Key, usize)], done: &mut StepEnd) -> bool {
        let keys: Vec<Key> = part.iter().map(|(key, _)| *key).collect();
        let Ok(prepared) = cpu.prepare_store(&keys, User::Tier) else {
            for key in &keys {
                self.queue.drop_queued(key);
            }
            return true;
        };
        let Some(prepared) = prepared else {
            return false;
        };
        done.evicted.extend(prepared.evicted);
        let mut given = vec![None; keys.len()];
        for (position, place) in prepared.positions.iter().zip(prepared.places) {
            if let Some(slot) = given.get_mut(*position) {
                *slot = Some(place);
            }
        }
        for ((key, tier), place) in part.iter().zip(given) {
            match place {
                Some(place) => {
                    self.queue.started(key, place.handle);
                    add(&mut done.starts, *tier, *key, place);
                }
                // A worker stores it meanwhile.
                None => self.queue.drop_queued(key),
            }
        }
        true
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

fn add(starts: &mut Vec<Start>, tier: usize, key: Key, place: crate::cpu::Place) {
    if !starts.iter().any(|start| start.tier == tier) {
        starts.push(Start {
            tier,
            ..Start::default()
        });
    }
    if let Some(start) = starts.iter_mut().find(|start| start.tier == tier) {
        start.keys.push(key);
        start.offsets.push(place.offset);
        start.handles.push(place.handle);
    }
}

fn key_of(cpu: &CpuTier, request: &Request, asked: Asked) -> Option<Key> {
    match asked {
        Asked::Hit(handle) | Asked::Writing(handle, _) => cpu.key_of(handle).copied(),
        Asked::Wanted(number) => {
            let number = usize::try_from(number).ok()?;
            request.wanted.get(number).map(|wanted| wanted.key)
        }
        Asked::Miss(_) => None,
    }
}

fn item(id: RequestId, asked: Asked, key: Option<&Key>, outside: &mut dyn Outside) -> Item {
    let missed = |group| Item {
        group,
        position: None,
        found: false,
    };
    match (asked, key) {
        // A row that was being written may be gone.
        (Asked::Miss(group), _) | (Asked::Writing(_, group), None) => missed(group),
        (_, Some(key)) => Item {
            group: key.group(),
            position: outside.position(id, key),
            found: true,
        },
        (_, None) => missed(GroupId(u32::MAX)),
    }
}

/// Time for the eviction policy.
pub(super) fn milliseconds(seconds: f64) -> u64 {
    let time = core::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A part of the arena in bytes.
fn share_of(arena: u64, per_mille: u32) -> u64 {
    let bytes = u128::from(arena) * u128::from(per_mille) / 1000;
    bytes.try_into().unwrap_or(u64::MAX)
}
