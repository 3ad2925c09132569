"""Which KV cache groups drop blocks, and why several blocks per chunk are refused with them.

vLLM zeroes the ids of blocks that left a window and were given to others, and sends only the rest,
their count and the place of the first: of ``[11, 0, 13, 14]`` a worker sees three blocks from place
0. vLLM's own chunk numbers do not say that a fourth is missing, so a worker that has nothing else
stores 13 and 14 one place too early, under a valid key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import iter_layer_specs

from kvstrata.vllm import facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import OffloadingSpec

# Groups of these kinds look back without a bound. All others drop blocks that have left their
# window.
_UNBOUNDED_KINDS = frozenset(
    {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec"}
)


def refusal(group_ids: Sequence[int]) -> str:
    """What to say where these groups drop blocks and a chunk holds several."""
    return (
        f"kvstrata: KV cache groups {list(group_ids)} drop blocks behind their window, and vLLM "
        "may then send a chunk of several blocks with one missing in the middle, without "
        "saying which: set blocks_per_chunk to 1 (and no block_size) in "
        "kv_connector_extra_config"
    )


def of_config(kv_cache_config: Any, group_ids: Iterable[int]) -> list[int]:
    """The groups among these that drop blocks, by their specifications."""
    return [
        group_id
        for group_id in group_ids
        if not all(
            _unbounded(type(spec).__name__, getattr(spec, "sliding_window", None))
            for spec in iter_layer_specs(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec)
        )
    ]


def problem(spec: OffloadingSpec) -> str | None:
    """Why a tier under vLLM's manager must not store what this spec's chunks hold, or `None`.

    A spec alone knows its groups' windows from vLLM 0.33 on; before, only
    :class:`kvstrata.vllm.connector.KVStrataConnector` can say.
    """
    if int(spec.blocks_per_chunk) == 1:
        return None
    told = facts.known(spec.extra_config.get(facts.KEY))
    bounded: list[int] = []
    for group in spec.config.groups:
        group_id = int(group.group_id)
        if told is not None:
            is_bounded = not _described_unbounded(told["groups"][group_id]["spec"])
        elif hasattr(group, "sliding_window_size_in_chunks"):
            is_bounded = group.sliding_window_size_in_chunks is not None
        else:
            return (
                f"kvstrata: a chunk holds {spec.blocks_per_chunk} blocks, and this connector does "
                f"not say whether KV cache group {group_id} drops blocks behind a window; vLLM "
                "would not say which block of a chunk is missing: use "
                "kv_connector=KVStrataConnector, or set blocks_per_chunk to 1 (and no block_size)"
            )
        if is_bounded:
            bounded.append(group_id)
    return refusal(bounded) if bounded else None


def _described_unbounded(described: dict[str, Any]) -> bool:
    """Of a specification as the facts have it: one, or one per layer."""
    each = [described] if "kind" in described else list(described.values())
    return all(_unbounded(item["kind"], item.get("sliding_window")) for item in each)


def _unbounded(kind: str, window: object) -> bool:
    return kind in _UNBOUNDED_KINDS and window is None
