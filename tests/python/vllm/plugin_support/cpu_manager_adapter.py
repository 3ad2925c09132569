"""Our manager in the shape that vLLM's own tests of its CPU manager ask for.

Behind vLLM's ``test_manager.py`` these names take the place of its own: chunks are rows of one
size, numbered by where they lie, and every call is a step of its own.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    Medium,
    PrepareStoreOutput,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstrata._native import CpuTier
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.opened import Opened

ROW = 4096
TOKENS = 16
GROUPS = (0, 1)
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def make_offload_key(name: bytes, group: int) -> Any:
    """Hashes as long as vLLM's real ones: its tests take a few letters."""
    return base.make_offload_key(name.ljust(32, b"."), group)


def to_key(number: int) -> Any:
    return make_offload_key(str(number).encode(), 0)


def make_cpu_manager(
    num_chunks: int = 4,
    cache_policy: str = "lru",
    *,
    enable_events: bool = False,
    store_threshold: int = 0,
    max_tracker_size: int = 64_000,
    **_: Any,
) -> Adapter:
    taken = {"store_threshold": max(1, store_threshold), "tracked_keys": max_tracker_size}
    return Adapter(num_chunks, cache_policy, events=enable_events, **taken)


class _Begun:
    """What the context of a request has among its state that the manager was told of."""


class Adapter:
    """Two groups of equal rows, no tier below."""

    medium = Medium.CPU

    def __init__(self, chunks: int, policy: str, *, events: bool, **taken: int) -> None:
        def opener(_: dict[str, Any]) -> Opened:
            cpu = CpuTier(chunks * ROW, dict.fromkeys(GROUPS, ROW), policy=policy, **taken)
            return Opened(cpu, (), lambda: None)

        self.manager: Any = KVStrataManager(dict.fromkeys(GROUPS, TOKENS), opener, events=events)
        self.manager.open({})

    def _ids(self, rows: Any) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([int(offset) // ROW for offset in rows.offsets])

    def _begin(self, context: Any) -> None:
        """vLLM's scheduler tells of each request first; its tests of the manager do not."""
        if context.get_state(_Begun) is None:
            context.set_state(_Begun())
            self.manager.on_new_request(context)

    def lookup(self, key: Any, context: Any) -> Any:
        answer = self.manager.lookup(key, context)
        self.manager.on_schedule_end(END)
        return answer

    def prepare_load(self, keys: Any, context: Any) -> CPULoadStoreSpec:
        self._begin(context)
        return self._ids(self.manager.prepare_load(keys, context))

    def prepare_store(self, keys: Any, context: Any) -> PrepareStoreOutput | None:
        self._begin(context)
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return None
        return PrepareStoreOutput(
            output.keys_to_store, self._ids(output.store_spec), output.evicted_keys
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)
