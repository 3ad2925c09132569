//! Counters, and what is where.

use serde_json::{Map, Value, json};

use super::{CpuTier, Presence};
use crate::eviction::Class;
use crate::slots::SizeClass;

/// What happened since the tier was made.
#[derive(Debug)]
pub(super) struct Counters {
    pub(super) lookups: u64,
    pub(super) lookup_hits: u64,
    pub(super) stored_keys: u64,
    pub(super) loaded_keys: u64,
    pub(super) refused_stores: u64,
    pub(super) evicted_rows: u64,
    pub(super) moved_slabs: u64,
    pub(super) unprotected_requests: u64,
    pub(super) unadmitted_stores: u64,
    pub(super) bypassed_stores: u64,
    pub(super) resets: u64,
    /// Rows that are being written.
    pub(super) writing: u64,
    /// Rows with a slot, per group.
    rows: Vec<u64>,
}

impl Counters {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            lookups: 0,
            lookup_hits: 0,
            stored_keys: 0,
            loaded_keys: 0,
            refused_stores: 0,
            evicted_rows: 0,
            moved_slabs: 0,
            unprotected_requests: 0,
            unadmitted_stores: 0,
            bypassed_stores: 0,
            resets: 0,
            writing: 0,
            rows: vec![0; groups],
        }
    }

    pub(super) fn looked_up(&mut self, found: &[Presence]) {
        let hits = found.iter().filter(|one| **one != Presence::Absent);
        self.lookups += u64::try_from(found.len()).unwrap_or(0);
        self.lookup_hits += u64::try_from(hits.count()).unwrap_or(0);
    }

    pub(super) fn add_row(&mut self, group: usize) {
        if let Some(rows) = self.rows.get_mut(group) {
            *rows += 1;
        }
    }

    pub(super) fn remove_row(&mut self, group: usize) {
        if let Some(rows) = self.rows.get_mut(group) {
            *rows = rows.saturating_sub(1);
        }
    }
}

impl CpuTier {
    /// Counters and gauges, with units in their names.
    ///
    /// `rows` counts slots in use by rows that lookups find, `orphaned_rows` those that are only
    /// held by a user; `payload_bytes` are the rows' own, `slot_bytes` with their padding, and
    /// `idle_bytes` those of slabs that serve no size.
    pub fn stats(&self) -> Map<String, Value> {
        let counters = &self.counters;
        let geometry = self.slots.geometry();
        let (listed, orphaned) = self.entries.counts();
        let idle_rows: usize = (0..geometry.classes())
            .filter_map(SizeClass::at)
            .map(|class| self.policy.evictable(Class(class.0)))
            .sum();
        let groups = self.options.row_bytes.iter().zip(&counters.rows);
        let payload: u64 = groups.clone().map(|((_, bytes), rows)| bytes * rows).sum();
        let slot_bytes: u64 = (0..geometry.classes())
            .filter_map(SizeClass::at)
            .map(|class| self.slots.taken(class) * geometry.stride(class).unwrap_or(0))
            .sum();
        let tail = if self.slots.tail_is_idle() {
            geometry.tail_bytes()
        } else {
            0
        };
        let idle = u64::from(self.slots.idle()) * geometry.slab_bytes() + tail;
        let (awaited_requests, awaited_bytes) = self.awaited();
        let by_group: Map<String, Value> = groups
            .map(|((group, _), rows)| (group.to_string(), json!(rows)))
            .collect();
        let fields = json!({
            "policy": self.policy.name(),
            "capacity_bytes": geometry.arena_bytes(),
            "slab_bytes": geometry.slab_bytes(),
            "payload_bytes": payload,
            "slot_bytes": slot_bytes,
            "idle_bytes": idle,
            "rows": listed,
            "rows_of_group": by_group,
            "orphaned_rows": orphaned,
            "writing_rows": counters.writing,
            "rows_in_use": listed.saturating_sub(idle_rows) + orphaned,
            "lookups": counters.lookups,
            "lookup_hits": counters.lookup_hits,
            "stored_keys": counters.stored_keys,
            "loaded_keys": counters.loaded_keys,
            "refused_stores": counters.refused_stores,
            "evicted_rows": counters.evicted_rows,
            "moved_slabs": counters.moved_slabs,
            "observed_requests": self.requests.observed(),
            "awaited_requests": awaited_requests,
            "awaited_bytes": awaited_bytes,
            "unprotected_requests": counters.unprotected_requests,
            "unadmitted_stores": counters.unadmitted_stores,
            "bypassed_stores": counters.bypassed_stores,
            "resets": counters.resets,
            "policy_bytes": self.policy.memory_bytes() + self.admission.memory_bytes(),
        });
        match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }
}
