//! The replay of a trace: what vLLM does with each request, in order.
//!
//! The blocks of a request are looked up in order, to the first that is not there; then every block
//! of the request that is not there is stored. With a GPU cache in front, the lookup in the tier
//! begins where the GPU's cache ends; a second tier is asked for what the first does not have.

use super::level::{Level, Traffic};
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::eviction::admission::AdmissionOptions;
use crate::eviction::request::{Context, RequestId};
use crate::eviction::{create_with, lru::Lru};

/// One tier of a simulation.
#[derive(Clone, Debug)]
pub struct TierSetting {
    /// Name of its policy.
    pub policy: String,
    /// Blocks it holds.
    pub capacity: usize,
    /// Keys that its policy's directory has at most; `None`: the default.
    pub directory: Option<usize>,
    /// What it takes.
    pub admission: AdmissionOptions,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The tier in question.
    pub tier: TierSetting,
    /// Blocks of a GPU cache in front of it; 0 for none.
    pub gpu_blocks: usize,
    /// A tier below it.
    pub below: Option<TierSetting>,
    /// Whether requests that load from the tier leave the head that they found on the GPU
    /// untouched there, as vLLM 0.33 does, and tell nothing of it.
    pub head_untold: bool,
    /// Whether the tier's policy is told of requests only when they end, and of nothing but their
    /// keys: what it is told inside vLLM's own managers.
    pub told_late: bool,
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests replayed.
    pub requests: u64,
    /// Blocks that were asked for.
    pub requested: u64,
    /// Blocks found in the GPU's cache, in the tier, in the one below, all without a gap before.
    pub gpu_hits: u64,
    /// See above.
    pub hits: u64,
    /// See above.
    pub below_hits: u64,
    /// What was written to the tier.
    pub traffic: Traffic,
    /// What was written to the tier below.
    pub below_traffic: Traffic,
    /// Bytes of memory that the policy held at the end.
    pub policy_bytes: u64,
}

/// Replays a trace; `after` is called with the number of blocks that each request found in the
/// tier.
///
/// # Errors
/// [`ErrorKind::Config`](crate::error::ErrorKind::Config) for a policy that is not known;
/// [`ErrorKind::Argument`](crate::error::ErrorKind::Argument) for a tier without room.
pub fn replay(trace: &Trace, setting: &Setting, mut after: impl FnMut(u64)) -> Result<Outcome> {
    let level = |tier: &TierSetting, name: &str| -> Result<Level> {
        if tier.capacity == 0 {
            let text = format!("{name} is 0; a tier has room for one block at least");
            return Err(Error::argument(text));
        }
        let policy = create_with(&tier.policy, tier.directory)?;
        Ok(Level::new(
            policy,
            tier.capacity,
            trace.unique_blocks,
            tier.admission,
        ))
    };
    let mut tier = level(&setting.tier, "capacity")?;
    if setting.told_late {
        tier = tier.told_late();
    }
    let below = setting.below.as_ref();
    let mut below = below
        .map(|below| level(below, "below_capacity"))
        .transpose()?;
    let lru = || Box::new(Lru::new());
    let gpu = || {
        let all = AdmissionOptions::default();
        Level::new(lru(), setting.gpu_blocks, trace.unique_blocks, all)
    };
    let mut gpu = (setting.gpu_blocks > 0).then(gpu);
    let mut outcome = Outcome::default();
    let mut path: Vec<u32> = Vec::new();
    for (id, request) in (0..).map(RequestId).zip(&trace.requests) {
        path.clear();
        path.extend(request.blocks());
        let context = Context {
            prompt_tokens: Some(request.prompt_tokens),
            new_tokens: None,
            hint: request.hint,
        };
        let on_gpu = gpu.as_ref().map_or(0, |gpu| prefix(gpu, &path));
        let rest = path.get(on_gpu..).unwrap_or_default();
        let (mut hits, mut below_hits) = (0, 0);
        for block in rest {
            if tier.has(*block) {
                hits += 1;
            } else if below.as_ref().is_some_and(|below| below.has(*block)) {
                below_hits += 1;
            } else {
                break;
            }
        }
        let untold = setting.head_untold && hits + below_hits > 0;
        let told = if untold { rest } else { &path };
        let levels = [Some(&mut tier), below.as_mut(), gpu.as_mut()];
        for level in levels.into_iter().flatten() {
            let loaded = prefix(level, told);
            level.arrive(id, request.milliseconds, told, context);
            level.store(told, loaded);
            level.finish(id, request.output_tokens, told);
        }
        outcome.requests += 1;
        outcome.requested += wide(path.len());
        outcome.gpu_hits += wide(on_gpu);
        outcome.hits += wide(hits);
        outcome.below_hits += wide(below_hits);
        after(wide(hits));
    }
    outcome.traffic = tier.traffic;
    outcome.below_traffic = below.map_or_else(Traffic::default, |below| below.traffic);
    outcome.policy_bytes = wide(tier.policy().memory_bytes());
    Ok(outcome)
}

fn prefix(level: &Level, path: &[u32]) -> usize {
    path.iter().take_while(|block| level.has(**block)).count()
}

fn wide(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
