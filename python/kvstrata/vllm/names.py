"""The names of options beside the tiers, in ``kv_connector_extra_config``."""

from __future__ import annotations

TIERS = "tiers"
STOCK_TIERS = "secondary_tiers"

# Read by KVStrataConnector alone: under another connector nothing would obey them.
CONNECTOR = ("on_reset", "persist_lora", "record", "require_salt")
BESIDE_TIERS = (*CONNECTOR, "model_identity", "tenant", "weights_id", "weights_sampling")

# Read here and nowhere in vLLM.
OF_ARENA = ("numa", "large_pages")
OF_CPU_TIER = ("theta", "directory", "protect_waiting")
OF_LOADS = ("load_wait_s", "load_share", "request_load_share")
OURS = ("slots", TIERS, *OF_ARENA, *OF_CPU_TIER, *OF_LOADS, *BESIDE_TIERS)
# Of vLLM's own managers: nothing would obey them where slots are exact.
OF_STOCK_MANAGERS = ("backpressure", "cache_policy_module_path", "tier_poll_interval_s")
# Read by vLLM's connector and specs, 0.32 and 0.33, and allowed under ours.
VLLM = (
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "cpu_bytes_to_use",
    "eviction_policy",
    "max_tracker_size",
    "offload_prompt_only",
    STOCK_TIERS,
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
    "store_threshold",
    "sync_load_budget_bytes",
    *OF_STOCK_MANAGERS,
)
