//! Counters, and what is under way.

use serde_json::{Map, Value, json};

use super::Manager;

/// What happened since the manager was made.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) wanted_rows: u64,
    pub(super) waits: u64,
    pub(super) timed_out_waits: u64,
    pub(super) cut_spans: u64,
}

impl Manager {
    /// Counters and gauges: `wanted_rows` were queued to be loaded from below, `waits` are requests
    /// that were told to ask again, `timed_out_waits` those of them that waited too long, and
    /// `cut_spans` requests whose rows together had no room.
    pub fn stats(&self) -> Map<String, Value> {
        let counters = &self.counters;
        let waiting = self
            .requests
            .iter()
            .filter(|request| request.waits_since.is_some())
            .count();
        let fields = json!({
            "wanted_rows": counters.wanted_rows,
            "waits": counters.waits,
            "timed_out_waits": counters.timed_out_waits,
            "cut_spans": counters.cut_spans,
            "queued_rows": self.queue.queued(),
            "loading_rows": self.queue.loading(),
            "held_rows": self.held.len(),
            "waiting_requests": waiting,
            "requests": self.requests.iter().count(),
            "refused_keys": self.refused.len(),
        });
        match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }
}
