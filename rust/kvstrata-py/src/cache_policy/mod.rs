//! Eviction policies as cache policies of vLLM's managers use them: by key.
//!
//! vLLM calls such a policy several times for each key, so what it calls once a key goes from its
//! attribute to here without Python code between.

mod keys;
mod lru;
mod named;

pub(crate) use lru::LruOrder;
pub(crate) use named::CacheOrder;
