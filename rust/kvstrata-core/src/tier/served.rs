//! What every kind of tier does for [`crate::tier::Tier`].

use core::fmt::Debug;
use core::time::Duration;

use serde_json::{Map, Value};

use crate::error::Result;
use crate::eviction::request::Context;
use crate::job::JobId;
use crate::key::Key;
use crate::tier::disk::DiskTier;

/// A tier that is open. The methods are those of [`crate::tier::Tier`], which documents them.
pub(crate) trait Served: Debug + Send + Sync {
    fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>>;
    fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()>;
    fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()>;
    fn touch(&self, keys: &[Key]) -> Result<()>;
    fn observe(&self, request: &str, keys: &[Key], context: Context) -> Result<()>;
    fn finish(&self, request: &str, output_tokens: Option<u32>) -> Result<()>;
    fn remove(&self, keys: &[Key]) -> Result<()>;
    fn reset(&self) -> Result<bool>;
    /// Whether nothing touches the arena any more; waits up to `timeout` for the jobs.
    fn wait_quiet(&self, timeout: Duration) -> bool;
    fn busy_offsets(&self) -> Vec<u64>;
    fn stats(&self) -> Map<String, Value>;
    fn capabilities(&self) -> Map<String, Value>;
    fn close(&self, timeout: Duration) -> Result<()>;
}

impl Served for DiskTier {
    fn lookup(&self, keys: &[Key]) -> Result<Vec<Option<bool>>> {
        Self::lookup(self, keys)
    }
    fn store(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        Self::store(self, job_id, keys, offsets)
    }
    fn load(&self, job_id: JobId, keys: &[Key], offsets: &[u64]) -> Result<()> {
        Self::load(self, job_id, keys, offsets)
    }
    fn touch(&self, keys: &[Key]) -> Result<()> {
        Self::touch(self, keys)
    }
    fn observe(&self, request: &str, keys: &[Key], context: Context) -> Result<()> {
        Self::observe(self, request, keys, context)
    }
    fn finish(&self, request: &str, output_tokens: Option<u32>) -> Result<()> {
        Self::finish(self, request, output_tokens)
    }
    fn remove(&self, keys: &[Key]) -> Result<()> {
        Self::remove(self, keys)
    }
    fn reset(&self) -> Result<bool> {
        Self::reset(self)
    }
    fn wait_quiet(&self, timeout: Duration) -> bool {
        Self::wait_quiet(self, timeout)
    }
    fn busy_offsets(&self) -> Vec<u64> {
        Self::busy_offsets(self)
    }
    fn stats(&self) -> Map<String, Value> {
        Self::stats(self)
    }
    fn capabilities(&self) -> Map<String, Value> {
        Self::capabilities(self)
    }
    fn close(&self, timeout: Duration) -> Result<()> {
        Self::close(self, timeout)
    }
}
