//! Which of the rows that a request asked for are to be loaded.

use super::requests::{Asked, Request};
use super::span::{self, Item};
use super::{Manager, Outside, RequestId};
use crate::cpu::CpuTier;
use crate::key::{GroupId, Key};

impl Manager {
    /// Queues what a request is after, as far as there is room for it.
    pub(super) fn plan(&mut self, cpu: &CpuTier, id: RequestId, outside: &mut dyn Outside) {
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
}

/// The key that was asked for, where it is still known.
pub(super) fn key_of(cpu: &CpuTier, request: &Request, asked: Asked) -> Option<Key> {
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

/// A part of the arena in bytes.
pub(super) fn share_of(arena: u64, per_mille: u32) -> u64 {
    let bytes = u128::from(arena) * u128::from(per_mille) / 1000;
    bytes.try_into().unwrap_or(u64::MAX)
}
