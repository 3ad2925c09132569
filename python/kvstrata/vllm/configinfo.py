"""Labels of `vllm:kv_offload_config_info`, vLLM 0.33's metric of what does not change.

Where vLLM's CPU tier has a label of the same meaning the name is vLLM's
(`CPUOffloadingInfo` in `vllm/v1/kv_offload/cpu/common.py`); its number of chunks has none where
slots fit their group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata.vllm.options import TierOptions
    from kvstrata.vllm.stackconfig import StackConfig
    from kvstrata.vllm.table import Capacity

TIER = "tier"
CPU_TIER = "0:primary"
KEYS = (
    TIER,
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "cpu_kv_cache_size_tokens",
    "capacity",
    "eviction_policy",
    "offload_policy",
    "slots",
)


def of_cpu(
    stack: StackConfig, found: Capacity, tokens: int | None, blocks_per_chunk: int
) -> dict[str, Any]:
    """Of the CPU tier; `tokens` fit for requests of the longest length, if that is known."""
    return {
        TIER: CPU_TIER,
        "cpu_blocks_per_chunk": blocks_per_chunk,
        "cpu_kv_cache_size_bytes": found.usable_bytes,
        "cpu_kv_cache_size_tokens": "None" if tokens is None else tokens,
        "eviction_policy": stack.eviction_policy,
        "slots": stack.slots,
    }


def of_tiers(kinds: Sequence[tuple[str, TierOptions]]) -> list[Mapping[str, Any]]:
    """Of the tiers below, each with its type and options, in their order."""
    return [
        {
            TIER: f"{number}:{kind}",
            "capacity": given.open_tier.get("capacity", ""),
            "eviction_policy": given.open_tier.get("policy", ""),
            "offload_policy": given.offload_policy.value,
        }
        for number, (kind, given) in enumerate(kinds, 1)
    ]
