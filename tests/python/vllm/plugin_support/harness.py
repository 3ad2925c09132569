"""vLLM's harness of scheduler tests (`RequestRunner`) over our connector, manager, rows and worker.

The text of vLLM's files is not ours: it is read from an unpacked source archive, this module's
names are put behind it, and nothing of it is kept. What a test of vLLM's says the manager answers
stays in force where it says *less* than ours would (a miss, no room, fewer keys to store); a hit,
and where rows are stored, is what our manager says. Every copy is made by our worker, late, and
compared byte by byte.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager

from kvstrata.vllm import spec as ours
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.rowworker import KVStrataRowWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import CanonicalKVCaches

UNSAID = object()
# Tests in which vLLM's double stores rows that were stored before. Ours stores a row once: there
# it forgets what it is offered, as though it had gone in between.
STORES_AGAIN = frozenset(
    {
        "test_max_load_tokens_limits_external_load",
        "test_offloading_connector",
        "test_request_finished_mixed_full_attn_and_sliding_window",
        "test_request_level_policy_stores_all_blocks",
        "test_request_preemption",
        "test_skip_reading_prefix_cache",
        "test_sliding_window_chunk_with_null_block_is_not_stored",
    }
)
# A test may watch these, but our manager hears of them whatever the test says.
ALWAYS = frozenset(
    {
        "complete_load",
        "complete_store",
        "observe",
        "on_request_finished",
        "on_reset_flushed",
        "on_schedule_end",
        "reset_cache",
        "rows_refused",
        "open",
        "shutdown",
        "stop",
    }
)


def current_test() -> str:
    """The function of vLLM's that runs now."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2]
    return name.partition(" ")[0].partition("[")[0]


class Offer(list[Any]):
    """Keys that a test lets the manager store."""


def generate_store_output(keys: Any) -> Offer:
    return Offer(keys)


class Method(MagicMock):
    """One method of the manager: what the test says, over what our manager says."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        said = super().__call__(*arguments, **named)
        return self.over(said, *arguments, **named)


def _over(manager: KVStrataManager, name: str) -> Callable[..., Any]:
    real = getattr(manager, name)

    def lookup(said: Any, key: Any, context: Any) -> Any:
        return real(key, context) if said is LookupResult.HIT else said

    def prepare_store(said: Any, keys: Any, context: Any) -> Any:
        if said is None:
            return None
        offered = list(said) if isinstance(said, Offer) else list(keys)
        if current_test() in STORES_AGAIN:
            manager.cpu.forget(offered)
        return real(offered, context)

    def other(said: Any, *arguments: Any, **named: Any) -> Any:
        if said is UNSAID:
            return real(*arguments, **named)
        if name in ALWAYS or name == "on_new_request":
            real(*arguments, **named)
        return said

    return {"lookup": lookup, "prepare_store": prepare_store}.get(name, other)


def watched(real: KVStrataManager) -> Any:
    """Our manager as a mock that vLLM's tests can watch and restrict."""
    manager = MagicMock(spec=real)
    names = [name for name in dir(OffloadingManager) if not name.startswith("_")]
    for name in {*names, *ALWAYS}:
        if not callable(getattr(real, name, None)):
            continue
        said = LookupResult.MISS if name == "lookup" else UNSAID
        method = Method(return_value=said)
        # What vLLM's tests reset must not undo this.
        object.__setattr__(method, "over", _late(real, name))
        setattr(manager, name, method)
    manager.secondary_tiers = ()
    manager.real = real
    return manager


def _late(real: KVStrataManager, name: str) -> Callable[..., Any]:
    """Our manager may change its methods when it is opened."""

    def call(said: Any, *arguments: Any, **named: Any) -> Any:
        return _over(real, name)(said, *arguments, **named)

    return call


class Copies:
    """A stamp per block and row, written before a store and looked for after a load."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        self.caches = caches
        self.blocks_per_chunk = blocks_per_chunk
        self.stored = 0
        self.loaded = 0

    def places(self, blocks: Any, rows: Any) -> list[tuple[int, int, bytes, int]]:
        """Group, block, key and sub-block of everything a job moves."""
        found = []
        first = 0
        for group, (count, index) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            keys = [
                key for key, at in zip(rows.keys, rows.groups.tolist(), strict=True) if at == group
            ]
            skipped = index % self.blocks_per_chunk
            for at in range(count):
                chunk, sub = divmod(skipped + at, self.blocks_per_chunk)
                found.append((group, int(blocks.block_ids[first + at]), keys[chunk], sub))
            first += count
        assert first == len(blocks.block_ids)
        return found

    def _pages(self, group: int, block: int) -> list[torch.Tensor]:
        refs = self.caches.group_data_refs[group]
        return [
            self.caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] for ref in refs
        ]

    def stamp(self, places: list[tuple[int, int, bytes, int]]) -> None:
        for group, block, key, sub in places:
            for layer, page in enumerate(self._pages(group, block)):
                page.copy_(_pattern(key, sub, layer, page.numel()))
            self.stored += 1

    def clear(self, places: list[tuple[int, int, bytes, int]]) -> None:
        for group, block, _, _ in places:
            for page in self._pages(group, block):
                page.zero_()

    def check(self, places: list[tuple[int, int, bytes, int]]) -> None:
        for group, block, key, sub in places:
            for layer, page in enumerate(self._pages(group, block)):
                wanted = _pattern(key, sub, layer, page.numel())
                assert torch.equal(page, wanted), "a block does not hold its row's bytes"
            self.loaded += 1


def _pattern(key: bytes, sub: int, layer: int, size: int) -> torch.Tensor:
    seed = int.from_bytes(key[-12:], "big") * 31 + sub * 7 + layer
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    return torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)


def make_double(base: type, row_double: type) -> type:
    """vLLM's double of a worker, whose jobs are copied by ours when the test completes them."""

    class Worker(base):  # type: ignore[misc]
        def __init__(self, real: KVStrataRowWorker, copies: Copies) -> None:
            super().__init__()
            self.real = real
            self.copies = copies
            self._store, self._load = real.submit_store, real.submit_load
            self._finished = real.get_finished
            for name in ("submit_store", "submit_load", "get_finished", "wait"):
                setattr(real, name, getattr(self, name))

        def complete_jobs(self, job_ids: set[int]) -> None:
            for job_id in sorted(job_ids & self.waiting_jobs):
                self._copy(job_id, *self.transfer_specs[job_id])
            super().complete_jobs(job_ids)

        def _copy(self, job_id: int, source: Any, target: Any) -> None:
            is_store = hasattr(source, "block_ids")
            blocks, rows = (source, target) if is_store else (target, source)
            places = self.copies.places(blocks, rows)
            if is_store:
                self.copies.stamp(places)
                assert self._store(job_id, source, target)
            else:
                self.copies.clear(places)
                assert self._load(job_id, source, target)
                self.copies.check(places)
            (result,) = self._finished()
            assert (result.job_id, result.success) == (job_id, True)
            assert not self.real.take_refused(), "our worker refused a row"
            assert not self.real.take_failed_loads()

        def named(self, source: Any, target: Any) -> tuple[Any, Any]:
            """The job as vLLM's harness reads it: keys in the place of our rows."""
            if hasattr(source, "block_ids"):
                return source, row_double(target.keys)
            return row_double(source.keys), target

    return Worker


def install(names: dict[str, Any]) -> None:
    """Put our parts in the place of the doubles of vLLM's ``utils.py``; `names` are its globals."""
    from vllm.config import KVTransferConfig

    from kvstrata.vllm.connector import KVStrataConnector

    double = make_double(names["MockOffloadingWorker"], names["MockLoadStoreSpec"])
    runner = names["RequestRunner"]

    def transfer(**options: Any) -> Any:
        extra = options["kv_connector_extra_config"]
        extra |= {
            "spec_name": "KVStrataSpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": "4MiB",
        }
        return KVTransferConfig(
            **{
                **options,
                "kv_connector": "KVStrataConnector",
                "kv_connector_module_path": "kvstrata.vllm.connector",
                "kv_load_failure_policy": "recompute",
            }
        )

    class Runner(runner):  # type: ignore[misc]
        """vLLM's harness; the ranks tell the scheduler how their bytes lie, as an engine does."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            told = self.worker_connector.get_handshake_metadata()
            count = named.get("worker_count", 1)
            self.scheduler_connector.set_xfer_handshake_metadata_pp_aware(
                {rank: dataclasses.replace(told, rank=rank) for rank in range(count)}
            )
            assert self.manager.real.is_open

    KVStrataSpec.double = double
    names |= {
        "KVTransferConfig": transfer,
        "OffloadingConnector": KVStrataConnector,
        "MockOffloadingSpec": KVStrataSpec,
        "RequestRunner": Runner,
        "generate_store_output": generate_store_output,
    }


class KVStrataSpec(ours.KVStrataSpec):
    """Our spec under its own name: a manager that can be watched, and a worker that waits."""

    double: Any = None
    handler: Any

    def get_manager(self) -> Any:
        if not hasattr(self, "manager"):
            real = super().get_manager()
            assert isinstance(real, KVStrataManager)
            self.manager = watched(real)
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        real = super().get_worker(kv_caches)
        assert isinstance(real, KVStrataRowWorker)
        self.handler = self.double(real, Copies(kv_caches, self.blocks_per_chunk))
        return real

    def complete_transfers(self) -> None:
        self.handler.complete_jobs(self.handler.waiting_jobs.copy())

    def get_completed_transfers(self) -> list[tuple[Any, Any]]:
        done = [
            self.handler.named(*self.handler.transfer_specs[job_id])
            for job_id in self.handler.completed_jobs
        ]
        self.handler.completed_jobs.clear()
        return done

    def get_flushed_transfers(self) -> list[tuple[Any, Any]]:
        flushed = [
            self.handler.named(*self.handler.transfer_specs[job_id])
            for job_id in self.handler.flushed_jobs
        ]
        self.handler.flushed_jobs.clear()
        return flushed
