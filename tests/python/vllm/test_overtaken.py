"""Requests that go on over a reset store nothing until they start over; what a start warns of."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_support.own_manager import HIT, MISS, Stack, keys_of
from vllm.v1.kv_offload.base import OffloadPolicy

import kvstrata
from kvstrata.vllm import compat, failurepolicy, overtaken

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)


def test_a_request_that_goes_on_over_a_reset_stores_nothing_until_it_starts_over() -> None:
    stack = Stack().open()
    keys = keys_of([1, 2])
    context, other = stack.request(keys), stack.request(keys)
    stack.forget_the_cpu_tier()
    overtaken.mark(context)
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == []
    assert stack.cpu.stats()["rows"] == 0
    output = stack.manager.prepare_store(keys[:1], other)
    assert output is not None
    assert output.keys_to_store == keys[:1]
    stack.manager.complete_store(set(keys[:1]), other)
    overtaken.starts_over(context)
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == keys[1:]
    stack.manager.complete_store(set(keys[1:]), context)
    assert [stack.manager.lookup(key, context) for key in keys] == [HIT, HIT]
    stack.manager.shutdown()


def test_blocks_of_windows_that_were_offered_before_a_reset_are_taken_away() -> None:
    full = SimpleNamespace(next_stored_chunk_idx=2, block_ids=[1, 2, 3, 4, 5])
    window = SimpleNamespace(next_stored_chunk_idx=2, block_ids=[6, 7, 8, 9, 10])
    short = SimpleNamespace(next_stored_chunk_idx=9, block_ids=[11])
    scheduler = SimpleNamespace(
        _req_status={
            "a": SimpleNamespace(group_states=(full, window)),
            "b": SimpleNamespace(group_states=(full, short)),
        },
        _sliding_window_groups=(1,),
        config=SimpleNamespace(blocks_per_chunk=2),
    )
    before = overtaken.offered(scheduler)
    window.next_stored_chunk_idx = short.next_stored_chunk_idx = 0
    overtaken.forget_blocks(before)
    assert full.block_ids == [1, 2, 3, 4, 5]
    assert window.block_ids == [0, 0, 0, 0, 10]
    assert short.block_ids == [0]


@pytest.mark.parametrize(("policy", "warned"), [("fail", True), ("recompute", False)])
def test_a_start_warns_where_a_failed_load_would_fail_its_request(
    policy: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        compat, "log_once", lambda level, text: said.append(f"{logging.getLevelName(level)} {text}")
    )
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy))
    failurepolicy.check(config, {}, exact=True)
    assert [text.startswith("WARNING") and "recompute" in text for text in said] == [True] * warned


def test_synchronous_loads_stay_off_with_slots_that_fit_their_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "log_once", lambda *_: None)
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace())
    exact, uniform = {"sync_load_budget_bytes": 5}, {"sync_load_budget_bytes": 5}
    failurepolicy.check(config, exact, exact=True)
    failurepolicy.check(config, uniform, exact=False)
    assert (exact, uniform) == ({"sync_load_budget_bytes": 0}, {"sync_load_budget_bytes": 5})


def test_a_request_that_waits_too_long_is_told_miss_and_the_clock_is_read_at_the_steps_end() -> (
    None
):
    now = [100.0]
    stack = Stack()
    stack.manager._clock = lambda: now[0]
    stack.open()
    keys = keys_of([1])
    writer, reader = stack.request(keys), stack.request(keys)
    stack.manager.prepare_store(keys, writer)
    stack.manager.lookup(keys[0], reader)
    stack.step()
    now[0] += 9.9
    stack.manager.lookup(keys[0], reader)
    stack.step()
    assert stack.manager.lookup(keys[0], reader) is not MISS
    now[0] += 0.2
    stack.step()
    assert stack.manager.lookup(keys[0], reader) is MISS
    assert stack.manager._snapshot()["timed_out_waits"] == 1
    stack.manager.shutdown()


def test_a_tier_that_wants_whole_requests_gets_rows_that_were_there_before_them() -> None:
    class Below:
        is_request_level = True
        medium = locality = None
        cache_hit_source = is_pending = False
        skipped_stores = 0

        def __init__(self) -> None:
            self.stored: list[Any] = []

        def wanted(self, keys: list[Any]) -> list[Any]:
            return keys

        def store(self, slots: Any) -> None:
            self.stored.append(list(slots.keys))
            stack.cpu.let_go(slots.handles)

        def poll(self) -> list[Any]:
            return []

        no_longer_busy = poll

    tier: Any = Below()
    stack = Stack()
    opener = stack.manager._opener
    stack.manager._opener = lambda byte_map: kvstrata_opened(opener(byte_map), tier)
    stack.open()
    keys = keys_of([1, 2, 3])
    stack.store(keys[:1])
    writer, context = stack.request(keys), stack.request(keys)
    answer = stack.manager.on_new_request(context)
    assert answer.policy is OffloadPolicy.REQUEST_LEVEL
    stack.manager.prepare_store(keys[1:2], writer)
    tier.stored.clear()
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == keys[2:]
    assert tier.stored == [keys[:1]]
    assert stack.manager.has_pending_work(), "a row that is still being written waits"
    stack.manager.complete_store(set(keys[1:2]), writer)
    stack.step()
    assert tier.stored == [keys[:1], keys[1:2], keys[1:2]]
    assert not stack.manager.has_pending_work()


def kvstrata_opened(opened: Any, tier: Any) -> Any:
    return type(opened)(opened.cpu, (tier,), opened.release)
