"""A stock spec and manager of vLLM's, driven as the scheduler drives them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from plugin_support.configs import offloading_config

END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def key(number: int, group_id: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group_id)


class Stack:
    """A stock spec and manager, driven as the scheduler drives them."""

    def __init__(self, spec: TieringOffloadingSpec) -> None:
        self.spec = spec
        manager = spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self.tier: Any = manager.secondary_tiers[0]
        self.view = manager.primary_tier.get_kv_memoryview()

    def request(self, name: str) -> ReqContext:
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def fill(self, chunk_id: int, value: int) -> None:
        for index in range(self.view.shape[1]):
            self.view[chunk_id, index] = value

    def value(self, chunk_id: int) -> int:
        row = bytes(self.view.cast("B")[chunk_id * self.view.shape[1] :][: self.view.shape[1]])
        assert len(set(row)) == 1, "the slot holds bytes of more than one row"
        return row[0]

    def store(self, context: ReqContext, values: dict[OffloadKey, int]) -> None:
        for position, each in enumerate(values):
            context.set_offload_key_position(each, position)
        output = self.manager.prepare_store(list(values), context)
        assert output is not None
        assert output.keys_to_store == list(values)
        for chunk_id, value in zip(output.store_spec.chunk_ids, values.values(), strict=True):
            self.fill(int(chunk_id), value)
        self.manager.complete_store(set(values), context)

    def settle(self) -> None:
        for _ in range(2000):
            self.manager.on_schedule_end(END)
            if not self.manager.has_pending_work():
                return
            time.sleep(0.001)
        pytest.fail("jobs never ended")

    def look(self, context: ReqContext, wanted: OffloadKey) -> LookupResult:
        """Ask until there is an answer, as the scheduler does over its steps."""
        until = time.monotonic() + 40
        while time.monotonic() < until:
            answer = self.manager.lookup(wanted, context)
            if answer in (LookupResult.HIT, LookupResult.MISS):
                return answer
            self.settle()
            time.sleep(0.001)
        pytest.fail("the lookup never resolved")

    def load(self, context: ReqContext, wanted: OffloadKey) -> int:
        spec = self.manager.prepare_load([wanted], context)
        value = self.value(int(spec.chunk_ids[0]))
        self.manager.complete_load({wanted}, context)
        return value


def open_stack(engine_id: str, *entries: dict[str, Any], **config: Any) -> Stack:
    return Stack(TieringOffloadingSpec(offloading_config(engine_id, list(entries), **config)))
