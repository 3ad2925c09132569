//! What an object tier tells about itself.

use serde_json::{Map, Value};

use crate::sys::sync::lock;
use crate::tier::object::ObjectTier;

impl ObjectTier {
    /// Counters and gauges; units are in the names, keys and rows where there is none.
    pub(super) fn tell(&self) -> Map<String, Value> {
        let mut all = self.around.metrics.snapshot();
        let degraded = self.health.add_to(&mut all, self.around.clock.now());
        self.counters.add_to(&mut all);
        all.insert("odd_names".into(), self.odd_names.get().into());
        all.insert("verdicts".into(), self.verdicts.len().into());
        let state = lock(&self.state);
        let health = if state.place.is_none() {
            "unusable"
        } else if state.reset_failed {
            "reset not recorded"
        } else if degraded {
            "degraded"
        } else {
            "ok"
        };
        all.insert("health".into(), health.into());
        let epoch = state.place.as_ref().map(|place| place.epoch.to_string());
        all.insert("epoch".into(), epoch.into());
        all.insert("queued_reads".into(), state.reads.len().into());
        all.insert("queued_writes".into(), state.writes.len().into());
        all.insert("in_flight_operations".into(), state.running.into());
        all.insert("in_flight_bytes".into(), state.running_bytes.into());
        all.insert("queued_deletions".into(), state.deletions.len().into());
        all.insert("asked_keys".into(), state.asked.len().into());
        all.insert("store_bytes_open".into(), state.store_bytes_open.into());
        all.insert("load_bytes_open".into(), state.load_bytes_open.into());
        drop(state);
        let jobs = &self.around.jobs;
        all.insert("running_jobs".into(), jobs.running().into());
        all.insert("unpolled_jobs".into(), jobs.unpolled().into());
        all
    }

    /// What the bucket can do and what was chosen; empty while it cannot be used.
    pub(super) fn describe(&self) -> Map<String, Value> {
        let mut all = Map::new();
        let Some(place) = lock(&self.state).place.clone() else {
            return all;
        };
        let location = &self.options.location;
        all.insert("scheme".into(), location.scheme.as_str().into());
        all.insert("bucket".into(), location.bucket.clone().into());
        all.insert("prefix".into(), location.prefix.clone().into());
        all.insert("addressing".into(), place.style.as_str().into());
        all.insert("conditional_put".into(), place.conditional_put.into());
        let signed = !self.options.is_private_path();
        all.insert("signed_payload".into(), signed.into());
        all.insert("slot_align".into(), 1.into());
        all.insert("may_hang".into(), true.into());
        all
    }
}
