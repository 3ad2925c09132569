//! Rows on their way from a tier below: queued, then loading.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::requests::{RequestId, Requests};
use crate::cpu::Handle;
use crate::key::Key;

/// Where a row is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has no slot yet.
    Queued,
    /// A tier writes it to the slot of this use.
    Loading(Handle),
}

#[derive(Debug)]
pub(super) struct Coming {
    pub(super) tier: usize,
    pub(super) stage: Stage,
    /// Bytes of its slot.
    pub(super) bytes: u64,
    /// Requests that wait for it.
    waiters: Vec<RequestId>,
}

impl Coming {
    pub(super) fn add(&mut self, waiter: RequestId) {
        if self.waiters.last() != Some(&waiter) && !self.waiters.contains(&waiter) {
            self.waiters.push(waiter);
        }
    }

    pub(super) fn waiters(&self) -> &[RequestId] {
        &self.waiters
    }

    fn is_awaited(&self, requests: &Requests) -> bool {
        self.waiters
            .iter()
            .any(|id| requests.get(*id).is_some_and(super::Request::is_waiting))
    }
}

/// See the module. Rows are started in the order in which they were queued.
#[derive(Debug, Default)]
pub(super) struct Queue {
    rows: HashMap<Key, Coming>,
    order: VecDeque<Key>,
    loading: usize,
    loading_bytes: u64,
}

impl Queue {
    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut Coming> {
        self.rows.get_mut(key)
    }

    pub(super) fn push(&mut self, key: Key, tier: usize, bytes: u64, waiter: RequestId) {
        let coming = Coming {
            tier,
            stage: Stage::Queued,
            bytes,
            waiters: vec![waiter],
        };
        self.rows.insert(key, coming);
        self.order.push_back(key);
    }

    /// The next row that somebody waits for, with its tier and bytes; others are dropped.
    pub(super) fn next(&mut self, requests: &Requests) -> Option<(Key, usize, u64)> {
        while let Some(key) = self.order.pop_front() {
            if let Some(row) = self.rows.get(&key) {
                if row.is_awaited(requests) {
                    return Some((key, row.tier, row.bytes));
                }
                self.rows.remove(&key);
            }
        }
        None
    }

    /// Whether rows are queued that a request waits for.
    pub(super) fn has_for(&self, waiter: RequestId) -> bool {
        let waits = |key: &Key| {
            self.rows
                .get(key)
                .is_some_and(|row| row.waiters.contains(&waiter))
        };
        self.order.iter().any(waits)
    }

    /// Takes all queued rows out that one request waits for, with their tiers.
    pub(super) fn take_for(&mut self, waiter: RequestId) -> Vec<(Key, usize)> {
        let rows = &self.rows;
        let mut taken = Vec::new();
        self.order.retain(|key| match rows.get(key) {
            Some(row) if row.waiters.contains(&waiter) => {
                taken.push((*key, row.tier));
                false
            }
            _ => true,
        });
        taken
    }

    /// Takes rows back that [`Queue::next`] gave and that found no room.
    pub(super) fn put_back(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            self.order.push_front(*key);
        }
    }

    pub(super) fn started(&mut self, key: &Key, handle: Handle) {
        if let Some(row) = self.rows.get_mut(key) {
            row.stage = Stage::Loading(handle);
            self.loading += 1;
            self.loading_bytes += row.bytes;
        }
    }

    /// Forgets a row that needs no load.
    pub(super) fn drop_queued(&mut self, key: &Key) {
        self.rows.remove(key);
    }

    /// Takes a row out whose load has ended; `None` where it was another load's.
    pub(super) fn ended(&mut self, key: &Key, handle: Handle) -> Option<Coming> {
        if self.rows.get(key)?.stage != Stage::Loading(handle) {
            return None;
        }
        let row = self.rows.remove(key)?;
        self.loading = self.loading.saturating_sub(1);
        self.loading_bytes = self.loading_bytes.saturating_sub(row.bytes);
        Some(row)
    }

    /// Drops queued rows that nobody waits for any more.
    pub(super) fn prune(&mut self, requests: &Requests) {
        let rows = &mut self.rows;
        self.order.retain(|key| {
            let awaited = rows.get(key).is_some_and(|row| row.is_awaited(requests));
            if !awaited {
                rows.remove(key);
            }
            awaited
        });
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn queued(&self) -> usize {
        self.order.len()
    }

    pub(super) const fn loading(&self) -> usize {
        self.loading
    }

    pub(super) const fn loading_bytes(&self) -> u64 {
        self.loading_bytes
    }
}
