//! What a disk tier tells about itself.

use serde_json::{Map, Value, json};

use crate::io::Completion;
use crate::job::JobKind;
use crate::key::GroupId;
use crate::metrics::count;
use crate::notice::Level;
use crate::sys::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sys::sync::{Arc, Mutex, lock, try_lock};
use crate::tier::disk::DiskTier;
use crate::tier::load_buffers::LoadBuffers;
use crate::tier::request::Request;
use crate::tier::starved::Limit;
use crate::tier::state::Flight;

/// Figures about space as they were when its lock was last free.
#[derive(Debug, Default)]
pub(super) struct SpaceFigures {
    capacity_bytes: AtomicU64,
    used_bytes: AtomicU64,
    foreign_files: AtomicU64,
    limit: Mutex<Option<Limit>>,
    starved: AtomicBool,
}

impl DiskTier {
    /// Counts how long an operation waited for its start, and how long it took from there.
    pub(super) fn note_times(&self, flight: &Flight, completion: &Completion) {
        let Some(started) = completion.operation.started.at() else {
            return;
        };
        let now = self.around.clock.now();
        let latency = &self.around.metrics.latency;
        let (wait, moved) = match flight.request.kind {
            JobKind::Load => (&latency.read_wait, &latency.read),
            JobKind::Store => (&latency.write_wait, &latency.write),
        };
        wait.record(started.saturating_duration_since(flight.submitted));
        moved.record(now.saturating_duration_since(started));
    }

    /// Counts how long a store waited until the writer thread began to plan it.
    pub(super) fn note_plan_wait(&self, request: &Arc<Request>) {
        let latency = &self.around.metrics.latency;
        latency
            .store_plan_wait
            .record(self.around.age(request, self.deadline));
    }

    /// Counters and gauges; units are in the names, keys and rows where there is none.
    pub(crate) fn stats(&self) -> Map<String, Value> {
        let mut all = self.around.metrics.snapshot();
        let now = self.around.clock.now();
        let degraded = self.health.add_to(&mut all, now);
        self.add_state(&mut all);
        if degraded && all.get("health").is_some_and(|health| health == "ok") {
            all.insert("health".into(), "degraded".into());
        }
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
        let jobs = &self.around.jobs;
        all.insert("running_jobs".into(), jobs.running().into());
        all.insert("unpolled_jobs".into(), jobs.unpolled().into());
        let io_backend = self.io_backend();
        if io_backend != self.capabilities.io_backend {
            let text = || {
                let chosen = self.capabilities.io_backend;
                format!("io_backend: the kernel refuses {chosen} now, {io_backend} took over")
            };
            let notices = &self.around.notices;
            notices.say_once(Level::Warning, "io_backend", text);
        }
        all.insert("io_backend".into(), io_backend.into());
        all.insert("io_mode".into(), self.io_mode().into());
        all
    }

    fn add_state(&self, all: &mut Map<String, Value>) {
        let state = lock(&self.state);
        let inventory = &state.inventory;
        let mut rows: Map<String, Value> = Map::new();
        let mut payload_bytes = 0_u64;
        for (class, files) in inventory.classes() {
            let (mut occupied, mut free) = (0_u64, 0_u64);
            let (mut capacity, mut stride_bytes) = (0_u64, 0_u64);
            for container in files.files.iter().filter_map(|id| inventory.container(*id)) {
                occupied += u64::from(container.rows.occupied());
                free += u64::from(container.rows.free());
                capacity += u64::from(container.row_file.geometry.row_count());
                stride_bytes = container.row_file.geometry.row_stride_bytes();
            }
            payload_bytes += occupied * files.row_bytes;
            let GroupId(group) = files.group;
            let evictable = count(inventory.evictable(class));
            rows.insert(
                group.to_string(),
                json!({
                    "rows": occupied,
                    "rows_capacity": capacity,
                    "row_bytes": files.row_bytes,
                    "row_stride_bytes": stride_bytes,
                    "rows_free": free,
                    "evictable_rows": evictable,
                    "pinned_rows": occupied.saturating_sub(evictable),
                    "files": files.files.len(),
                }),
            );
        }
        all.insert("rows".into(), inventory.index.len().into());
        all.insert("payload_bytes".into(), payload_bytes.into());
        all.insert("groups".into(), rows.into());
        all.insert("touched_pages".into(), inventory.touched.len().into());
        all.insert("epoch".into(), state.epoch.into());
        all.insert("queued_stores".into(), state.queued.len().into());
        all.insert("store_bytes_open".into(), state.store_bytes_open.into());
        all.insert("load_bytes_open".into(), state.load_bytes_open.into());
        all.insert("rows_being_read".into(), state.waiters.rows().into());
        let buffers = state.buffers.as_ref();
        let lent_bytes = buffers.map_or(0, LoadBuffers::lent_bytes);
        let stuck_bytes = buffers.map_or(0, LoadBuffers::stuck_bytes);
        all.insert("load_buffer_bytes".into(), lent_bytes.into());
        all.insert("stuck_load_buffer_bytes".into(), stuck_bytes.into());
        let health = if self.is_poisoned() {
            "poisoned"
        } else if state.reset_failed {
            "reset not recorded"
        } else {
            "ok"
        };
        all.insert("health".into(), health.into());
    }

    pub(super) fn add_space(&self, all: &mut Map<String, Value>) {
        // The writer holds this lock while it makes room; figures may be a moment old, never
        // waited for.
        let figures = &self.space_figures;
        if let Some(space) = try_lock(&self.space) {
            let set = |figure: &AtomicU64, value| figure.store(value, Ordering::Relaxed);
            set(&figures.capacity_bytes, space.capacity_bytes);
            set(&figures.used_bytes, space.used_bytes);
            set(&figures.foreign_files, count(space.foreign.len()));
            *lock(&figures.limit) = space.limit;
            let starved = !space.starved.is_empty();
            figures.starved.store(starved, Ordering::Relaxed);
        }
        let get = |figure: &AtomicU64| Value::from(figure.load(Ordering::Relaxed));
        all.insert("capacity_bytes".into(), get(&figures.capacity_bytes));
        all.insert("used_bytes".into(), get(&figures.used_bytes));
        all.insert("foreign_files".into(), get(&figures.foreign_files));
        let limit = lock(&figures.limit).map_or("none", Limit::as_str);
        all.insert("space_limit".into(), limit.into());
        if figures.starved.load(Ordering::Relaxed)
            && all.get("health").is_some_and(|health| health == "ok")
        {
            all.insert("health".into(), "no space".into());
        }
    }
}
