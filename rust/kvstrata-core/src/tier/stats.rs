//! What a disk tier tells about itself.

use serde_json::{Map, Value, json};

use crate::key::GroupId;
use crate::sys::sync::lock;
use crate::tier::disk::DiskTier;

impl DiskTier {
    /// Counters and gauges; units are in the names, keys and rows where there is none.
    pub(crate) fn stats(&self) -> Map<String, Value> {
        let mut all = self.around.metrics.snapshot();
        self.add_state(&mut all);
        self.add_space(&mut all);
        if let Some(engine) = self.engine.get() {
            let (queue, counters) = (engine.queue(), engine.counters());
            all.insert("queued_reads".into(), queue.queued_reads.into());
            all.insert("queued_writes".into(), queue.queued_writes.into());
            all.insert("in_flight_operations".into(), queue.in_flight.into());
            all.insert("stuck_operations".into(), queue.stuck.into());
            all.insert("bounced_bytes".into(), counters.bounced_bytes.into());
            all.insert(
                "resumed_transfers".into(),
                counters.resumed_transfers.into(),
            );
            all.insert("retried_calls".into(), counters.retried_calls.into());
            all.insert(
                "buffered_operations".into(),
                counters.buffered_operations.into(),
            );
            all.insert("replaced_threads".into(), counters.replaced_threads.into());
        }
        all.insert("io_backend".into(), self.capabilities.io_backend.into());
        all.insert("io_mode".into(), self.capabilities.io_mode().into());
        all
    }

    fn add_state(&self, all: &mut Map<String, Value>) {
        let state = lock(&self.state);
        let inventory = &state.inventory;
        let mut rows: Map<String, Value> = Map::new();
        let mut payload_bytes = 0_u64;
        for (class, files) in inventory.classes() {
            let (mut occupied, mut capacity, mut stride_bytes) = (0_u64, 0_u64, 0_u64);
            for container in files.files.iter().filter_map(|id| inventory.container(*id)) {
                occupied += u64::from(container.rows.occupied());
                capacity += u64::from(container.row_file.geometry.row_count());
                stride_bytes = container.row_file.geometry.row_stride_bytes();
            }
            payload_bytes += occupied * files.row_bytes;
            let GroupId(group) = files.group;
            rows.insert(
                group.to_string(),
                json!({
                    "rows": occupied,
                    "rows_capacity": capacity,
                    "row_bytes": files.row_bytes,
                    "row_stride_bytes": stride_bytes,
                    "evictable_rows": inventory.evictable(class),
                    "files": files.files.len(),
                }),
            );
        }
        all.insert("rows".into(), inventory.index.len().into());
        all.insert("payload_bytes".into(), payload_bytes.into());
        all.insert("groups".into(), rows.into());
        all.insert("epoch".into(), state.epoch.into());
        all.insert("queued_stores".into(), state.queued.len().into());
        all.insert("store_bytes_open".into(), state.store_bytes_open.into());
        let health = if self.is_poisoned() {
            "poisoned"
        } else if state.reset_failed {
            "reset not recorded"
        } else {
            "ok"
        };
        all.insert("health".into(), health.into());
    }

    fn add_space(&self, all: &mut Map<String, Value>) {
        // The writer holds this lock while it makes room; figures may be a moment old, never
        // waited for.
        if let Ok(space) = self.space.try_lock() {
            all.insert("capacity_bytes".into(), space.capacity_bytes.into());
            all.insert("used_bytes".into(), space.used_bytes.into());
            all.insert("foreign_files".into(), space.foreign.len().into());
        }
    }
}
