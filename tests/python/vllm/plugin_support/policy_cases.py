"""A pytest plugin: vLLM's own tests run with our cache policies in place of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.policies import arc, lru
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvstrata.vllm import policy

if TYPE_CHECKING:
    import pytest

# They look into vLLM's own classes: lists, targets, heaps.
READ_INTERNALS = (
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries",
    "TestARCPolicy",
    "test_arc_ghost_hit_adapts_once_per_request_before_insertion",
    "test_arc_pending_chunk_is_not_a_frequency_hit",
    "test_arc_counts_reuse_once_and_keeps_insertions_in_t1",
    "test_arc_reuse_wins_if_same_request_later_reinserts_key",
    "test_reset_discards_stale_request_access_classification",
)


def pytest_configure() -> None:
    """Put ours in place before the tests are imported."""
    lru.LRUCachePolicy = policy.LRU  # type: ignore[misc]
    arc.ARCCachePolicy = policy.ARC  # type: ignore[misc]
    registry = CachePolicyFactory._registry
    registry["lru"] = lambda: policy.LRU
    registry["arc"] = lambda: policy.ARC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what reads internals, unless all are asked for."""
    if os.environ.get("KVSTRATA_TEST_ALL_CASES") != "1":
        items[:] = [
            item for item in items if not any(name in item.nodeid for name in READ_INTERNALS)
        ]
