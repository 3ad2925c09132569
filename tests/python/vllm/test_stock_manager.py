"""The tier under vLLM's own `TieringOffloadingSpec`, by registered name or module path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugin_support.configs import disk_entry
from plugin_support.stock_stack import END, key, open_stack
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata

if TYPE_CHECKING:
    from plugin_support.stand_in import Opener

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def url(tmp_path: Path) -> str:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return f"file://{root}"


def test_a_row_comes_back_from_the_tier_after_the_primary_evicted_it(
    any_tier: str, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    first = stack.request("a")
    stack.store(first, {key(n): n + 1 for n in range(4)})
    stack.settle()
    second = stack.request("b")
    stack.store(second, {key(n): n + 1 for n in range(10, 14)})
    stack.settle()
    third = stack.request("c")
    assert stack.manager.primary_tier.lookup(key(2), third) is LookupResult.MISS
    assert stack.look(third, key(2)) is LookupResult.HIT
    assert stack.load(third, key(2)) == 3
    stack.manager.shutdown()


def test_a_row_comes_back_in_another_manager_on_the_same_root(
    any_tier: str, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), group_ids=(1, 3))
    context = stack.request("a")
    stack.store(context, {key(1, 1): 7, key(1, 3): 9})
    stack.settle()
    stack.manager.shutdown()
    again = open_stack(engine_id, disk_entry(url), group_ids=(1, 3))
    context = again.request("b")
    assert again.look(context, key(1, 1)) is LookupResult.HIT
    assert again.look(context, key(1, 3)) is LookupResult.HIT
    assert again.load(context, key(1, 1)) == 7
    assert again.load(context, key(1, 3)) == 9
    assert again.look(context, key(2, 1)) is LookupResult.MISS
    again.manager.shutdown()


def test_another_identity_sees_nothing_of_it(any_tier: str, engine_id: str, url: str) -> None:
    stack = open_stack(engine_id, disk_entry(url))
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    stack.manager.shutdown()
    other = open_stack(engine_id, disk_entry(url, model_identity={"revision": 2}))
    assert other.look(other.request("b"), key(1)) is LookupResult.MISS
    other.manager.shutdown()


def test_the_tier_is_found_by_module_path(any_tier: str, engine_id: str, url: str) -> None:
    entry = disk_entry(url, type="KVStrataDiskTier", module_path="kvstrata.vllm.tiers")
    stack = open_stack(engine_id, entry)
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    assert stack.tier.enabled
    stack.manager.shutdown()


def test_rows_are_sized_by_the_view_and_keyed_by_original_group_ids(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(
        engine_id, disk_entry(url), group_ids=(2, 5), bytes_per_block=5000, world_size=2
    )
    assert opener.opened[0].row_bytes == {2: 12288, 5: 12288}
    assert stack.view.strides[0] == 12288
    assert opener.options[0]["honours_busy"] is False
    stack.manager.shutdown()


def test_a_failed_load_is_a_miss_for_every_waiter_and_a_later_store_heals_it(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    stack.store(stack.request("a"), {key(1): 7, key(2): 8})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    native = opener.opened[0]
    native.load_outcomes = {key(1): "corrupt"}
    waiters = [stack.request("b"), stack.request("c")]
    for context in waiters:
        assert stack.manager.lookup(key(1), context) is LookupResult.HIT_PENDING
    assert stack.manager.lookup(key(2), waiters[0]) is LookupResult.HIT_PENDING
    stack.settle()
    for context in waiters:
        assert stack.look(context, key(1)) is LookupResult.MISS
    assert stack.look(waiters[0], key(2)) is LookupResult.HIT, "the good row of the job is kept"
    assert stack.load(waiters[0], key(2)) == 8
    assert sum(name == "load" for name, _ in native.calls) == 1, (
        "a row that was kept was read again"
    )
    native.load_outcomes = {}
    stack.store(stack.request("d"), {key(1): 9})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    context = stack.request("e")
    assert stack.look(context, key(1)) is LookupResult.HIT
    assert stack.load(context, key(1)) == 9
    stack.manager.shutdown()


@pytest.mark.parametrize("call", ["lookup", "store", "load", "poll", "stats", "touch"])
def test_a_raising_tier_never_reaches_the_engine(
    opener: Opener, engine_id: str, url: str, call: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    native = opener.opened[0]
    native.raising = {call}
    context = stack.request("b")
    stack.manager.lookup(key(1), context)
    stack.store(context, {key(3): 4})
    stack.manager.on_schedule_end(END)
    stack.manager.get_stats()
    stack.manager.touch([key(3)], context)
    native.raising = set()
    stack.settle()
    stack.manager.get_stats()
    stack.manager.on_request_finished(context)
    answer = stack.look(stack.request("c"), key(3))
    assert answer is LookupResult.HIT
    assert stack.tier.faults.total > 0
    stack.manager.shutdown()


def test_a_load_that_cannot_be_submitted_does_not_livelock_its_request(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    stack.manager.primary_tier.reset_cache()
    opener.opened[0].raising = {"load"}
    assert stack.look(stack.request("b"), key(1)) is LookupResult.MISS
    stack.manager.shutdown()


def test_a_reset_waits_for_jobs_and_leaves_none_behind(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    native = opener.opened[0]
    native.holding = True
    stack.store(stack.request("a"), {key(1): 7})
    assert stack.manager.has_pending_work()
    native.raising = {"poll"}
    stack.manager.reset_cache()
    assert not stack.manager.has_pending_work()
    assert ("drain", None) in native.calls
    stack.manager.shutdown()


def test_a_reset_waits_for_jobs_though_drain_itself_fails(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=4)
    native = opener.opened[0]
    native.holding = True
    stack.store(stack.request("a"), {key(1): 7})
    native.raising = {"drain"}
    stack.manager.reset_cache()
    assert not native.results, "the reset did not wait for what was in flight"
    stack.manager.shutdown()


def test_a_store_is_handed_down_in_prompt_order_though_vllm_gives_a_set(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url), chunks=32, group_ids=(0, 1))
    context = stack.request("a")
    prompt = {key(n * 7919, group): n + 1 for n in range(12) for group in (0, 1)}
    stack.store(context, prompt)
    stack.settle()
    (stored,) = [what for name, what in opener.opened[0].calls if name == "store"]
    expected = [k for k in prompt if k[-1] == 0] + [k for k in prompt if k[-1] == 1]
    assert stored == expected
    for each, value in prompt.items():
        assert set(opener.opened[0].rows[each]) == {value}, "a row went under another's key"
    stack.manager.shutdown()


def test_shutdown_lets_go_of_the_memory_before_vllm_releases_it(
    any_tier: str, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url))
    region = stack.spec._scheduler_mmap
    path, mapping = Path(region.mmap_path), region.mmap_obj
    assert path.exists()
    stack.view = memoryview(b"")
    stack.manager.shutdown()
    assert not path.exists()
    assert mapping.closed, "something still holds the memory"
    stack.tier.shutdown()
    assert stack.tier.lookup(key(1), ReqContext(req_id="late")) is LookupResult.MISS


def test_memory_the_kernel_still_owns_stays_mapped(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url))
    opener.opened[0].raising = {"close"}
    with pytest.raises(kvstrata.BusyError):
        stack.manager.shutdown()
    assert stack.view[0, 0] == 0, "the primary tier's memory was released"
    opener.opened[0].raising = set()
    stack.manager.shutdown()


def test_stored_rows_are_announced_once_where_events_are_on(
    opener: Opener, engine_id: str, url: str
) -> None:
    stack = open_stack(engine_id, disk_entry(url, enable_kv_events=True), events=True)
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    events = list(stack.tier.take_events())
    assert [(event.keys, event.removed) for event in events] == [([key(1)], False)]
    assert not list(stack.tier.take_events())
    stack.manager.shutdown()


def test_every_metric_that_is_emitted_was_declared(any_tier: str, engine_id: str, url: str) -> None:
    entry = disk_entry(url)
    stack = open_stack(engine_id, entry)
    declared = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [entry]})
    stack.store(stack.request("a"), {key(1): 7})
    stack.settle()
    stack.tier._metrics._due = 0.0
    stats = stack.manager.get_stats()
    assert stats is not None
    if any_tier == "native":
        stored = stats.data["data"]["vllm:kvstrata_tier_bytes_stored"]
        assert stored == {("kvstrata_disk",): stack.view.shape[1]}
    names = set(stats.data["data"])
    assert any("kvstrata" in name for name in names)
    assert names <= set(declared)
    stack.manager.shutdown()
