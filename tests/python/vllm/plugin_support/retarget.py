"""vLLM's own cases for its offloading worker, with our worker in the place of its double.

The text of vLLM's test file is not ours: it is read from an unpacked source archive, this module's
names are put behind it, and nothing of it is kept.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from kvstrata.memory.arena import Arena
from kvstrata.memory.layout import PageRef
from kvstrata.vllm import packed
from kvstrata.vllm.rowworker import KVStrataRowWorker
from plugin_support.rows import PAGE, Rank, row_spec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

# Cases of vLLM's file that our worker cannot stand in for, with the reason.
NOT_APPLICABLE = {
    "test_offloading_connector_worker_accepts_plugin_spec_default_layout": (
        "is about vLLM's base class of specs; no worker is made in it"
    ),
}

_numbers = itertools.count()
_kept: list[Any] = []


def retarget(source: str) -> str:
    """vLLM's file, for our worker: its backends on this platform, its jobs with our rows."""
    lines = source.replace(
        "ATTN_BACKENDS: list[str] = []", 'ATTN_BACKENDS: list[str] = ["CPU_ATTN"]', 1
    )
    skips = "\n".join(
        f"{name} = pytest.mark.skip(reason={reason!r})({name})"
        for name, reason in NOT_APPLICABLE.items()
    )
    return f"""{lines}

import plugin_support.retarget as _ours

_their_worker, _their_store, _their_load = _make_worker, _store_metadata, _load_metadata


def _make_worker(*arguments, **options):
    return _ours.ours_for(*_their_worker(*arguments, **options))


def _store_metadata(*arguments, **options):
    return _ours.with_rows(_their_store(*arguments, **options))


def _load_metadata(*arguments, **options):
    return _ours.with_rows(_their_load(*arguments, **options))


{skips}
"""


def ours_for(worker: Any, spec: Any) -> tuple[Any, Any]:
    """vLLM's connector worker over a real one of ours, which it may watch; real registration."""
    rank = Rank(_arena(1 << 14), ((PageRef(0, PAGE),),))
    worker.worker = MagicMock(wraps=rank.worker)
    spec.get_worker.return_value = None

    def make(caches: CanonicalKVCaches) -> KVStrataRowWorker:
        largest = sum(item.page_size_bytes for item in caches.tensors)
        return KVStrataRowWorker(
            caches,
            packed.group_refs(caches, None, None),
            _arena(4 * largest),
            blocks_per_chunk=2,
            self_test_at=0,
        )

    spec.get_worker.side_effect = make
    return worker, spec


def with_rows(metadata: Any) -> Any:
    """Jobs of one block, with a row of ours on the other side."""
    for job in metadata.store_jobs.values():
        job.dst_spec = row_spec([0], [0], [0])
    for job in metadata.load_jobs.values():
        job.src_spec = row_spec([0], [0], [0])
    return metadata


def _arena(size: int) -> Arena:
    made = Arena.create(size, f"kvstrata-retarget-{os.getpid()}-{next(_numbers)}")
    _kept.append(made)
    return made
