"""`lru` and `arc_vllm` find, request by request, what vLLM's own classes find on real traces."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import pytest

from kvstrata._native import Trace

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(
    os.environ.get("KVSTRATA_TEST_VLLM") != "0.33", reason="the classes of vLLM 0.33 are compared"
)

TRACES = Path(__file__).resolve().parents[3] / "benches" / "traces"


def _keys(count: int) -> list[bytes]:
    return [struct.pack(">QQI", block, block, 0) for block in range(count)]


def vllms_hits(trace: Trace, policy: str, capacity: int) -> list[int]:
    """What vLLM's manager with its own policy finds of each request by the replay rule."""
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_chunks=capacity, cache_policy=policy)
    own = manager._policy
    keys = [OffloadKey(key) for key in _keys(trace.unique_blocks)]
    hits = []
    for number, path in enumerate(trace.paths()):
        context = ReqContext(req_id=str(number))
        wanted = [keys[block] for block in path]
        # As the connector does: a request's keys have places, so that its tail goes first.
        for place, key in enumerate(wanted, 1):
            context.set_offload_key_position(key, place * trace.block_tokens)
        manager.on_new_request(context)
        found = 0
        while found < len(wanted) and own.get(wanted[found]) is not None:
            found += 1
        hits.append(found)
        head, rest = wanted[:found], wanted[found:]
        if head:
            manager.prepare_load(head, context)
            manager.complete_load(head, context)
        missing = sum(own.get(key) is None for key in rest)
        there = len(wanted) - missing
        # What cannot be there at once is left out: the head is kept.
        while rest and there + missing > capacity:
            missing -= own.get(rest.pop()) is None
        stored = manager.prepare_store(rest, context) if rest else None
        if rest:
            assert stored is not None
            manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
    return hits


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "share",
    [
        0.05,
        *(pytest.param(share, marks=pytest.mark.slow) for share in (0.01, 0.02, 0.1, 0.25)),
    ],
)
@pytest.mark.parametrize(("ours", "theirs"), [("lru", "lru"), ("arc_vllm", "arc")])
@pytest.mark.parametrize("name", ["mc_conv", pytest.param("cc6a", marks=pytest.mark.slow)])
def test_no_request_finds_anything_else_than_under_vllms_class(
    name: str, ours: str, theirs: str, share: float
) -> None:
    trace = Trace(gzip.decompress((TRACES / f"{name}.jsonl.gz").read_bytes()))
    capacity = int(share * trace.unique_blocks)
    hits: list[int] = []
    trace.replay(ours, capacity, each=hits)
    expected = vllms_hits(trace, theirs, capacity)
    assert sum(one != other for one, other in zip(hits, expected, strict=True)) == 0
