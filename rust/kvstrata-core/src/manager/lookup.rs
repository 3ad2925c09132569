//! Lookups, key by key.

use super::requests::{Asked, Request, Wanted};
use super::{ASKED_MAX, Answer, Manager, Outside, RequestId};
use crate::cpu::{CpuTier, Pinned};
use crate::key::Key;

impl Manager {
    /// What there is of a key for a request. Starts nothing and takes no slot.
    pub fn lookup(
        &mut self,
        cpu: &mut CpuTier,
        id: RequestId,
        key: &Key,
        outside: &mut dyn Outside,
    ) -> Answer {
        if self.is_stopped {
            return Answer::Miss;
        }
        let Some(request) = self.requests.get_mut(id) else {
            return Answer::Miss;
        };
        if request.asked.is_empty() {
            self.asking.push(id);
        }
        if request.asked.len() >= ASKED_MAX {
            return Answer::Miss;
        }
        if !self.refused.is_empty() && self.refused.contains(key) {
            return miss(request, key);
        }
        if !request.unfit.is_empty() && request.unfit.contains(key) {
            return miss(request, key);
        }
        let handle = match cpu.pin_ready(key) {
            Pinned::Ready(handle) => {
                if request.allowed.cpu || request.brought.contains_key(key) {
                    request.asked.push(Asked::Hit(handle));
                    return Answer::Hit;
                }
                cpu.let_go(&[handle], true);
                return miss(request, key);
            }
            Pinned::Writing(handle) => Some(handle),
            Pinned::Absent => None,
        };
        if request.is_tired || request.failed.contains(key) {
            return miss(request, key);
        }
        if let Some(limit) = request.limit
            && outside.position(id, key).is_none_or(|end| end > limit)
        {
            return miss(request, key);
        }
        match handle {
            Some(handle) => self.writing(id, key, handle),
            None => self.absent(id, key, outside),
        }
    }

    /// A row that a worker or a tier below is writing.
    fn writing(&mut self, id: RequestId, key: &Key, handle: crate::cpu::Handle) -> Answer {
        let Some(request) = self.requests.get_mut(id) else {
            return Answer::Miss;
        };
        let allowed = match self.queue.get_mut(key) {
            Some(row) if request.allowed.cpu || request.allowed.allows(row.tier) => {
                row.add(id);
                true
            }
            Some(_) => false,
            None => request.allowed.cpu,
        };
        if !allowed {
            return miss(request, key);
        }
        request.asked.push(Asked::Writing(handle, key.group()));
        request.is_pending = true;
        Answer::Pending
    }

    fn absent(&mut self, id: RequestId, key: &Key, outside: &mut dyn Outside) -> Answer {
        let Some(request) = self.requests.get_mut(id) else {
            return Answer::Miss;
        };
        if let Some(row) = self.queue.get_mut(key)
            && request.allowed.allows(row.tier)
        {
            row.add(id);
            return want(request, key, row.tier, true);
        }
        let mut unknown = false;
        for tier in 0..self.options.tiers {
            if !request.allowed.allows(tier) {
                continue;
            }
            match outside.has(tier, key) {
                Some(true) => return want(request, key, tier, false),
                Some(false) => {}
                None => unknown = true,
            }
        }
        if !unknown {
            return miss(request, key);
        }
        request.asked.push(Asked::Miss(key.group()));
        request.is_pending = true;
        Answer::Retry
    }
}

fn miss(request: &mut Request, key: &Key) -> Answer {
    request.asked.push(Asked::Miss(key.group()));
    Answer::Miss
}

fn want(request: &mut Request, key: &Key, tier: usize, queued: bool) -> Answer {
    let Ok(position) = u32::try_from(request.wanted.len()) else {
        return miss(request, key);
    };
    request.wanted.push(Wanted {
        key: *key,
        tier,
        queued,
    });
    request.asked.push(Asked::Wanted(position));
    request.is_pending = true;
    Answer::Pending
}
