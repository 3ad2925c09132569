//! Request traces: which blocks each request asked for, and when.
//!
//! Two forms are read, one JSON value a line:
//!
//! * `kvtrace-ranges-1`: a header `{format, name, requests, unique_blocks, block_tokens}`, then
//!   `{"t": seconds, "s": session, "o": output tokens, "h": hint, "r": [first, count, ...]}`;
//! * Mooncake's: `{"timestamp": milliseconds, "input_length", "output_length", "hash_ids": [...]}`
//!   with blocks of 512 tokens, of which the last one counts only when it is full.
//!
//! Block ids are prefix-keyed in both: the same id means the same whole prefix.

use hashbrown::HashMap;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::eviction::request::{Hint, Tag};

/// Tokens of a block in traces of Mooncake's form.
const MOONCAKE_BLOCK_TOKENS: u32 = 512;
/// Blocks of a request: a million tokens are 65,536 blocks of 16.
const REQUEST_BLOCKS_MAX: u64 = 1 << 20;
/// Different blocks of a trace: what the replay holds of each takes 4 GiB then.
const UNIQUE_BLOCKS_MAX: usize = 1 << 28;
/// The format named in the header of the other form.
const RANGES: &str = "kvtrace-ranges-1";

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Milliseconds since the beginning of the trace.
    pub milliseconds: u64,
    /// Tokens of the response, if known.
    pub output_tokens: Option<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// What follows.
    pub hint: Hint,
    /// Runs of consecutive blocks: first number, count.
    pub ranges: Vec<(u32, u32)>,
}

impl TraceRequest {
    /// Its blocks in token order.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges
            .iter()
            .flat_map(|(first, count)| *first..first.saturating_add(*count))
    }
}

/// A trace in memory. Blocks are numbered from 0 without gaps, in the order of first use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Number of different blocks.
    pub unique_blocks: u32,
    /// Its requests in order.
    pub requests: Vec<TraceRequest>,
}

/// Gives blocks numbers without gaps.
#[derive(Default)]
struct Numbers(HashMap<u64, u32>);

impl Numbers {
    fn of(&mut self, id: u64) -> u32 {
        let next = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        *self.0.entry(id).or_insert(next)
    }
}

/// The tag that stands for a block in a policy (the finalizer of `SplitMix64`, Steele et al. 2014).
pub const fn tag(block: u32) -> Tag {
    #[expect(clippy::as_conversions, reason = "widened; From is not const")]
    let mut mixed = (block as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    Tag(mixed ^ (mixed >> 31))
}

impl Trace {
    /// Blocks that its requests ask for.
    pub fn requested(&self) -> u64 {
        let ranges = self.requests.iter().flat_map(|request| &request.ranges);
        ranges.map(|(_, count)| u64::from(*count)).sum()
    }

    /// Reads a trace of either form.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::error::ErrorKind::Argument), with the number of the line, for
    /// anything that is not such a trace.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let mut trace = Self {
            block_tokens: MOONCAKE_BLOCK_TOKENS,
            ..Self::default()
        };
        let mut numbers = Numbers::default();
        let mut latest = 0;
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let at = number.saturating_add(1);
            let value: Value = serde_json::from_slice(line)
                .map_err(|error| Error::argument(format!("line {at} of the trace: {error}")))?;
            if value.get("format").is_some() {
                trace.read_header(&value, at)?;
                continue;
            }
            let asked = blocks_of(&value);
            if asked > REQUEST_BLOCKS_MAX {
                let most = format!("a request of {asked} blocks; at most {REQUEST_BLOCKS_MAX}");
                return Err(Error::argument(format!("line {at} of the trace: {most}")));
            }
            let mut request = trace.read_request(&value, &mut numbers).ok_or_else(|| {
                Error::argument(format!("line {at} of the trace is not a request"))
            })?;
            if numbers.0.len() > UNIQUE_BLOCKS_MAX {
                let most = format!("more than {UNIQUE_BLOCKS_MAX} different blocks");
                return Err(Error::argument(format!("line {at} of the trace: {most}")));
            }
            // A clock that goes back stands still.
            latest = request.milliseconds.max(latest);
            request.milliseconds = latest;
            trace.requests.push(request);
        }
        trace.unique_blocks = u32::try_from(numbers.0.len()).unwrap_or(u32::MAX);
        if trace.requests.is_empty() {
            return Err(Error::argument("the trace has no requests".to_owned()));
        }
        Ok(trace)
    }

    fn read_header(&mut self, value: &Value, at: usize) -> Result<()> {
        let tokens = value.get("block_tokens").and_then(Value::as_u64);
        let tokens = tokens.and_then(|tokens| u32::try_from(tokens).ok());
        let format = value.get("format").and_then(Value::as_str);
        match tokens {
            Some(tokens) if tokens > 0 && format == Some(RANGES) => self.block_tokens = tokens,
            _ => {
                let text = format!("line {at} of the trace: not a header of {RANGES}");
                return Err(Error::argument(text));
            }
        }
        self.name = value
            .get("name")
            .and_then(Value::as_str)
            .map(ToOwned::to_owned);
        Ok(())
    }

    fn read_request(&self, value: &Value, numbers: &mut Numbers) -> Option<TraceRequest> {
        let whole = |name: &str| value.get(name).and_then(Value::as_u64);
        let small = |name: &str| whole(name).and_then(|value| u32::try_from(value).ok());
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let mut blocks = 0_u32;
        let mut add = |id: u64| {
            let number = numbers.of(id);
            blocks = blocks.saturating_add(1);
            match ranges.last_mut() {
                Some((first, count)) if first.saturating_add(*count) == number => *count += 1,
                _ => ranges.push((number, 1)),
            }
        };
        if let Some(ids) = value.get("hash_ids") {
            let prompt = small("input_length")?;
            let full = usize::try_from(prompt / self.block_tokens).ok()?;
            for id in ids.as_array()?.iter().take(full) {
                add(id.as_u64()?);
            }
            return Some(TraceRequest {
                milliseconds: milliseconds(value.get("timestamp")?.as_f64()?)?,
                output_tokens: small("output_length"),
                prompt_tokens: prompt,
                hint: Hint::None,
                ranges,
            });
        }
        for pair in value.get("r")?.as_array()?.chunks(2) {
            let [first, count] = pair else { return None };
            let first = first.as_u64()?;
            for id in first..first.checked_add(count.as_u64()?)? {
                add(id);
            }
        }
        let hint = match whole("h") {
            Some(1) => Hint::ToolUse,
            Some(2) => Hint::EndOfTurn,
            _ => Hint::None,
        };
        Some(TraceRequest {
            milliseconds: milliseconds(value.get("t")?.as_f64()? * 1000.0)?,
            output_tokens: small("o"),
            prompt_tokens: blocks.saturating_mul(self.block_tokens),
            hint,
            ranges,
        })
    }
}

/// Blocks that a line says a request has, whatever else is wrong with it.
fn blocks_of(value: &Value) -> u64 {
    let list = |name: &str| value.get(name).and_then(Value::as_array);
    let ids = list("hash_ids").map_or(0, |ids| u64::try_from(ids.len()).unwrap_or(u64::MAX));
    let counts = list("r").into_iter().flatten().skip(1).step_by(2);
    counts
        .filter_map(Value::as_u64)
        .fold(ids, u64::saturating_add)
}

/// A time that is not negative, nor beyond anything.
fn milliseconds(value: f64) -> Option<u64> {
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "in range"
    )]
    (0.0..1e15).contains(&value).then_some(value.round() as u64)
}
