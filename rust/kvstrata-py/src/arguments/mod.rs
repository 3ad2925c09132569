//! Arguments as Python gives them, checked one by one; a refusal names the argument.

mod bytes;
mod deferred;
mod given;
mod keys;
mod named;
mod numbers;
mod offsets;
mod root;
mod row_bytes;
mod size;

use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;

pub(crate) use bytes::bytes;
pub(crate) use deferred::{Deferred, optional};
pub(crate) use given::Given;
pub(crate) use keys::{Groups, Keys};
pub(crate) use named::{Count, Flag, JobId, Named, PositiveSeconds, Probability, Seconds, Text};
pub(crate) use numbers::{Moment, Number32, Number64, Numbers, Objects, Pairs, Positions, Size};
pub(crate) use offsets::Offsets;
pub(crate) use root::Root;
pub(crate) use row_bytes::RowBytes;
pub(crate) use size::SizeText;

/// Declares names for the generic argument types: `Marker = "name", kind`.
macro_rules! names {
    ($($marker:ident = $name:literal, $kind:ident;)*) => {$(
        #[derive(Debug)]
        pub(crate) enum $marker {}
        impl Named for $marker {
            const NAME: &'static str = $name;
            const KIND: ErrorKind = ErrorKind::$kind;
        }
    )*};
}

names! {
    Capacity = "capacity", Config;
    MinFree = "min_free", Config;
    Policy = "policy", Config;
    IoBackend = "io_backend", Config;
    Deadline = "deadline_s", Config;
    ShareMode = "share_mode", Config;
    Required = "required", Config;
    HonoursBusy = "honours_busy", Config;
    Endpoint = "endpoint", Config;
    Region = "region", Config;
    Addressing = "addressing", Config;
    AllowHttp = "allow_http", Config;
    CaBundle = "ca_bundle", Config;
    RequestsMax = "requests_max", Config;
    InFlightMax = "in_flight_max", Config;
    LookupWait = "lookup_wait_s", Config;
    FoundFor = "found_s", Config;
    AbsentFor = "absent_s", Config;
    Theta = "theta", Config;
    StoreThreshold = "store_threshold", Config;
    TrackedKeys = "tracked_keys", Config;
    Directory = "directory", Config;
    ProtectWaiting = "protect_waiting", Config;
    OlderThan = "older_than_s", Config;
    TimeLimit = "time_limit_s", Config;
    DryRun = "dry_run", Config;
    Timeout = "timeout_s", Argument;
    RequestId = "request_id", Argument;
    PromptTokens = "prompt_tokens", Argument;
    NewTokens = "new_tokens", Argument;
    OutputTokens = "output_tokens", Argument;
    Hint = "hint", Argument;
    ArenaBytes = "arena_bytes", Config;
    Align = "align", Config;
    Below = "below", Argument;
    Success = "success", Argument;
    Handles = "handles", Argument;
    Lost = "lost", Argument;
    Busy = "busy", Argument;
    Now = "now", Argument;
    Tiers = "tiers", Argument;
    TokensPerChunk = "tokens_per_chunk", Argument;
    Answers = "answers", Argument;
    Sources = "sources", Argument;
    WaitFor = "wait_s", Argument;
    Share = "share", Argument;
    RequestShare = "request_share", Argument;
    Blocks = "capacity", Argument;
    TailFirst = "tail_first", Argument;
    Victims = "n", Argument;
    AllKeys = "keys", Argument;
    UseLikelihood = "theta", Argument;
    GpuBlocks = "gpu_blocks", Argument;
    BelowPolicy = "below_policy", Config;
    BelowBlocks = "below_capacity", Argument;
    BelowLikelihood = "below_theta", Argument;
    Requests = "store_threshold", Argument;
    Known = "directory", Argument;
    HeadUntold = "head_untold", Argument;
    ToldLate = "told_late", Argument;
}

/// Name of the type of `object`, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

/// `object` as it would be printed, short, for messages.
pub(crate) fn shown(object: &Bound<'_, PyAny>) -> String {
    const CHARACTERS_MAX: usize = 60;
    match object.repr() {
        Ok(text) => text
            .to_string_lossy()
            .chars()
            .take(CHARACTERS_MAX)
            .collect(),
        Err(_) => type_name(object),
    }
}
