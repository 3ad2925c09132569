//! Queued rows get slots: their loads may begin.

use super::plan::share_of;
use super::requests::Request;
use super::step_end::{Start, StepEnd};
use super::{Manager, RequestId};
use crate::cpu::{CpuTier, Place, User};
use crate::key::Key;

impl Manager {
    /// Starts as many queued rows as their share allows and as there is room for.
    pub(super) fn start(&mut self, cpu: &mut CpuTier, done: &mut StepEnd) {
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
    pub(super) fn unblock(&mut self, cpu: &mut CpuTier, asking: &[RequestId], done: &mut StepEnd) {
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
}

fn add(starts: &mut Vec<Start>, tier: usize, key: Key, place: Place) {
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
