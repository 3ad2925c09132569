//! The object tier behind the interface of all tiers.

use core::time::Duration;

use serde_json::{Map, Value};

use crate::error::Result;
use crate::eviction::request::Context;
use crate::job::JobId;
use crate::key::Key;
use crate::sys::sync::Arc;
use crate::tier::object::ObjectTier;
use crate::tier::served::Served;

/// An object tier that is open. Requests under way keep the tier itself.
#[derive(Debug)]
pub(crate) struct ServedObjects(pub(crate) Arc<ObjectTier>);

impl Served for ServedObjects {
    fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        self.0.look_up(keys)
    }
    fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        self.0.begin_store(job_id, keys, offsets)
    }
    fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        self.0.begin_load(job_id, keys, offsets)
    }
    /// Servers keep no time of access.
    fn touch(&self, _: &[Key]) -> Result<()> {
        self.0.open_state().map(drop)
    }
    fn observe(&self, request: &str, keys: &[Key], context: Context) -> Result<()> {
        self.0.observe(request, keys, context)
    }
    fn finish(&self, request: &str, _: Option<u32>) -> Result<()> {
        self.0.finish(request)
    }
    fn remove(&self, keys: &[Key]) -> Result<()> {
        self.0.hide(keys)
    }
    fn reset(&self) -> Result<bool> {
        self.0.begin_epoch()
    }
    fn wait_quiet(&self, timeout: Duration) -> bool {
        self.0.is_quiet_within(timeout)
    }
    /// A slot is in use until its job's result is there, and no longer.
    fn busy_offsets(&self) -> Vec<u64> {
        Vec::new()
    }
    fn stats(&self) -> Map<String, Value> {
        self.0.tell()
    }
    fn capabilities(&self) -> Map<String, Value> {
        self.0.describe()
    }
    fn close(&self, timeout: Duration) -> Result<()> {
        self.0.close_within(timeout)
    }
}
