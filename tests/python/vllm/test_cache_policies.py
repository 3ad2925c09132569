"""Our policies as cache policies of vLLM's own managers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from plugin_support import policy_cases, vllms_cases
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvstrata._native import Trace
from kvstrata.vllm import compat, plugin, policy

TRACES = Path(__file__).resolve().parents[3] / "benches" / "traces"
SUITE = "tests/v1/kv_offload/cpu/test_manager.py"


def keys(first: int, count: int) -> list[OffloadKey]:
    return [make_offload_key(n.to_bytes(32, "big"), 0) for n in range(first, first + count)]


def context(name: str, of: list[OffloadKey]) -> ReqContext:
    made = ReqContext(req_id=name)
    for place, key in enumerate(of, 1):
        made.set_offload_key_position(key, place * 16)
    return made


def serve(manager: CPUOffloadingManager, name: str, of: list[OffloadKey]) -> list[OffloadKey]:
    """A request as the connector brings it; returns what had to go for it."""
    asked = context(name, of)
    manager.on_new_request(asked)
    found = 0
    while found < len(of) and manager._policy.get(of[found]) is not None:
        found += 1
    if found:
        manager.prepare_load(of[:found], asked)
        manager.complete_load(of[:found], asked)
    stored = manager.prepare_store(of[found:], asked)
    assert stored is not None
    manager.complete_store(stored.keys_to_store, asked)
    manager.on_request_finished(asked)
    return list(stored.evicted_keys)


@pytest.mark.parametrize("name", sorted(plugin.POLICIES))
def test_a_policy_is_found_by_its_name_once_the_plugin_is_loaded(name: str) -> None:
    plugin.register()
    assert CachePolicyFactory.get_cache_policy_cls(name) is getattr(policy, plugin.POLICIES[name])


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_a_policy_is_found_by_the_path_of_its_module(cls: str) -> None:
    manager = CPUOffloadingManager(4, cls, plugin.POLICY_MODULE)
    assert type(manager._policy) is getattr(policy, cls)


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_a_full_cache_lets_the_tail_of_the_oldest_request_go(cls: str) -> None:
    manager = CPUOffloadingManager(8, cls, plugin.POLICY_MODULE)
    old, new = keys(0, 4), keys(100, 4)
    assert serve(manager, "old", old) == []
    assert serve(manager, "new", new) == []
    assert serve(manager, "next", keys(200, 2)) == [old[3], old[2]]


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_what_is_being_loaded_stays(cls: str) -> None:
    manager = CPUOffloadingManager(4, cls, plugin.POLICY_MODULE)
    old = keys(0, 4)
    serve(manager, "old", old)
    asked = context("loads", old)
    manager.on_new_request(asked)
    manager.prepare_load(old[:3], asked)
    other = keys(50, 2)
    assert manager.prepare_store(other, context("other", other)) is None
    one = keys(60, 1)
    stored = manager.prepare_store(one, context("one", one))
    assert stored is not None
    assert stored.evicted_keys == [old[3]]
    manager.complete_load(old[:3], asked)


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_what_is_stored_may_go_although_its_request_has_not_ended(cls: str) -> None:
    manager = CPUOffloadingManager(4, cls, plugin.POLICY_MODULE)
    for number in range(4):
        own = keys(10 * number, 2)
        asked = context(str(number), own)
        manager.on_new_request(asked)
        stored = manager.prepare_store(own, asked)
        assert stored is not None
        assert len(stored.evicted_keys) == (2 if number > 1 else 0)
        manager.complete_store(stored.keys_to_store, asked)


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_uses_do_not_pile_up_where_all_is_found(cls: str) -> None:
    manager = CPUOffloadingManager(8, cls, plugin.POLICY_MODULE)
    held = keys(0, 4)
    serve(manager, "first", held)
    # Of a request whose rows are all there nothing is stored.
    for number in range(20):
        asked = context(f"again {number}", held)
        manager.on_new_request(asked)
        manager.prepare_load(held, asked)
        manager.complete_load(held, asked)
        manager.touch(held, asked)
        manager.on_request_finished(asked)
    order = manager._policy._order
    assert len(order.kept) + len(order.freed) <= 2 * len(held), "what one request used, at most"
    # They have been taken up, not lost: nothing is held for a load any more.
    assert len(serve(manager, "other", keys(100, 8))) == 4


@pytest.mark.parametrize("cls", ["LRU", "ARC", "S3FIFO", "TH"])
def test_a_reset_forgets_all_of_it(cls: str) -> None:
    manager = CPUOffloadingManager(4, cls, plugin.POLICY_MODULE)
    serve(manager, "old", keys(0, 4))
    manager.reset_cache()
    assert all(manager._policy.get(key) is None for key in keys(0, 4))
    assert serve(manager, "again", keys(0, 4)) == []


@pytest.mark.skipif(compat.release() != (0, 33), reason="0.33's classes are compared")
@pytest.mark.parametrize(("ours", "theirs"), [("LRU", "lru"), ("ARC", "arc")])
def test_victim_for_victim_the_same_goes_as_under_vllms_class(ours: str, theirs: str) -> None:
    text = gzip.decompress((TRACES / "mc_conv.jsonl.gz").read_bytes())
    first = b"\n".join(text.split(b"\n")[:2001])
    trace = Trace(first)
    all_keys = keys(0, trace.unique_blocks)
    capacity = trace.unique_blocks // 20
    managers = (
        CPUOffloadingManager(capacity, ours, plugin.POLICY_MODULE),
        CPUOffloadingManager(capacity, theirs),
    )
    gone = 0
    for number, path in enumerate(trace.paths()):
        own = [all_keys[block] for block in path][:capacity]
        one, other = (serve(manager, str(number), own) for manager in managers)
        assert one == other, number
        gone += len(one)
    assert gone > trace.unique_blocks // 2


@pytest.mark.timeout(300)
def test_vllms_own_cases_pass_with_our_policies(tmp_path: Path) -> None:
    suite = vllms_cases.sources() / SUITE
    (tmp_path / "test_cases.py").write_text(suite.read_text())
    ran = vllms_cases.cases(tmp_path, 280, "-p", policy_cases.__name__, str(tmp_path))
    assert any(not was_skipped for _, was_skipped in ran)
