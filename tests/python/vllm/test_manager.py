"""Our manager over the CPU tier and tiers on disk: what is found, kept, moved and given back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.own_manager import (
    END,
    HIT,
    MISS,
    PENDING,
    ROWS,
    TOKENS,
    Stack,
    bytes_of,
    keys_of,
)
from plugin_support.stand_in import Result
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, TierFilter, TierMatcher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstrata
from kvstrata.vllm import metrics
from kvstrata.vllm.rowspec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Stacks with so many tiers below, on roots of this test."""
    made: list[Stack] = []

    def stack(tiers: int = 0, **options: Any) -> Stack:
        roots = [tmp_path / f"root{number}" for number in range(tiers)]
        for one in made:
            one.manager.shutdown()
        made.append(Stack(roots, **options).open())
        return made[-1]

    yield stack
    for one in made:
        one.manager.shutdown()
        assert one.released == 1
        assert one.manager.faults.total == 0, "something was held back"


def test_a_stored_row_is_on_its_way_until_the_workers_are_done_and_then_loads(
    make: Callable[..., Stack],
) -> None:
    stack = make()
    keys = keys_of(range(3)) + keys_of(range(3), group=3)
    context = stack.request(keys)
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == keys
    assert stack.manager.lookup(keys[0], context) is PENDING
    stack.write(output.store_spec)  # type: ignore[arg-type]
    stack.manager.complete_store(set(keys), context)
    assert stack.load(keys) == [HIT] * 6
    assert stack.in_use() == 0


def test_a_job_names_group_chunk_and_place_of_each_row(make: Callable[..., Stack]) -> None:
    stack = make()
    keys = keys_of(range(2)) + keys_of([7], group=3)
    context = stack.request(keys)
    context.set_offload_key_position(keys[1], 5 * TOKENS)
    context.set_offload_key_position(keys[2], 5 * TOKENS + 3)
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    rows: Any = output.store_spec
    assert rows.keys == tuple(keys)
    assert rows.groups.tolist() == [0, 0, 1], "positions among the selected groups, not their ids"
    assert rows.chunks.tolist() == [0, 4, UNKNOWN]
    ends = [
        offset + ROWS[int.from_bytes(key[-4:], "big")]
        for key, offset in zip(rows.keys, rows.offsets.tolist(), strict=True)
    ]
    assert len(set(rows.offsets.tolist())) == 3
    assert max(ends) <= len(stack.arena)


def test_rows_that_are_there_are_left_out_and_what_went_is_named(
    make: Callable[..., Stack],
) -> None:
    stack = make(slots=4)
    stack.store(keys_of([1, 2]))
    output = stack.store(keys_of([1, 5, 2, 6]))
    assert output.keys_to_store == keys_of([5, 6])
    assert output.evicted_keys == []
    output = stack.store(keys_of([9]))
    assert output.evicted_keys == keys_of([6]), "the tail of what was stored last but one"
    assert stack.load(keys_of([6])) == [MISS]


def test_a_store_without_room_is_refused_and_changes_nothing(make: Callable[..., Stack]) -> None:
    stack = make(slots=2)
    stack.store(keys_of([1, 2]))
    assert stack.store(keys_of([3, 4, 5])) is None
    assert stack.load(keys_of([1, 2])) == [HIT, HIT]


def test_hits_of_a_step_cannot_be_pushed_out_by_stores_of_that_step(
    make: Callable[..., Stack],
) -> None:
    stack = make(slots=2)
    keys = keys_of([1, 2])
    stack.store(keys)
    context = stack.request(keys)
    assert [stack.manager.lookup(key, context) for key in keys] == [HIT, HIT]
    assert stack.store(keys_of([3])) is None
    rows: Any = stack.manager.prepare_load(keys, context)
    stack.step()
    assert stack.store(keys_of([3])) is None, "the workers still load"
    stack.check(rows)
    stack.manager.complete_load(set(keys), context)
    assert stack.store(keys_of([3])).evicted_keys == keys_of([2])


@pytest.mark.parametrize("end", ["step", "finish"])
def test_hits_that_are_not_loaded_are_let_go(make: Callable[..., Stack], end: str) -> None:
    stack = make(slots=1)
    stack.store(keys_of([1]))
    context = stack.request()
    for _ in range(3):
        stack.manager.lookup(keys_of([1])[0], context)
    assert stack.in_use() == 1
    if end == "step":
        stack.step()
    else:
        stack.manager.on_request_finished(context)
    assert stack.in_use() == 0


def test_stored_rows_go_below_and_come_back_when_the_cpu_tier_has_lost_them(
    make: Callable[..., Stack],
) -> None:
    stack = make(tiers=1)
    keys = keys_of(range(4)) + keys_of(range(4), group=3)
    stack.store(keys)
    stack.settle()
    assert stack.in_use() == 0
    stack.forget_the_cpu_tier()
    stack.arena[:] = bytes(len(stack.arena))
    assert stack.load(keys) == [HIT] * 8
    assert stack.in_use() == 0


def test_rows_come_back_after_a_restart(make: Callable[..., Stack]) -> None:
    keys = keys_of(range(4))
    stack = make(tiers=1)
    stack.store(keys)
    stack.settle()
    assert make(tiers=1).load([*keys, *keys_of([99])]) == [HIT] * 4 + [MISS]


def test_every_tier_gets_what_is_stored_and_the_first_that_has_a_row_gives_it(
    make: Callable[..., Stack],
) -> None:
    stack = make(tiers=2)
    stack.store(keys_of([1, 2]))
    stack.settle()
    first, second = stack.manager.secondary_tiers
    assert [tier.native.stats()["rows"] for tier in (first, second)] == [2, 2]
    first.native.remove(keys_of([1]))
    stack.forget_the_cpu_tier()
    assert stack.load(keys_of([1, 2])) == [HIT, HIT]
    assert [tier.native.stats()["load_keys"] for tier in (first, second)] == [1, 1]


def test_rows_of_a_job_reach_a_tier_in_the_order_of_the_prompt(make: Callable[..., Stack]) -> None:
    stack = make(tiers=1)
    seen: list[Any] = []
    native = stack.manager.secondary_tiers[0].native
    stack.manager.secondary_tiers[0].native = _Recording(native, seen)
    keys = keys_of(range(5)) + keys_of(range(5), group=3)
    stack.store(keys)
    assert seen == [tuple(keys)]
    stack.manager.secondary_tiers[0].native = native
    stack.settle()


class _Recording:
    def __init__(self, native: Any, seen: list[Any]) -> None:
        self._native = native
        self._seen = seen

    def store(self, job_id: int, keys: Any, offsets: Any) -> None:
        self._seen.append(tuple(keys))
        self._native.store(job_id, keys, offsets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def test_where_a_row_came_from_is_told_to_those_who_waited_for_it_until_they_end(
    make: Callable[..., Stack],
) -> None:
    stack = make(tiers=1)
    keys = keys_of([1])
    stack.store(keys)
    stack.settle()
    context = stack.request()
    assert stack.manager.get_load_source(keys[0], context) is CacheHitSource.HOST
    stack.forget_the_cpu_tier()
    stack.ask(keys, context)
    assert stack.manager.get_load_source(keys[0], context) is CacheHitSource.DISK
    stack.manager.prepare_load(keys, context)
    stack.manager.complete_load(set(keys), context)
    # vLLM asks when the load is prepared.
    assert stack.manager.get_load_source(keys[0], context) is CacheHitSource.DISK
    later = stack.request(keys)
    assert stack.ask(keys, later) == [HIT]
    assert stack.manager.get_load_source(keys[0], later) is CacheHitSource.HOST
    stack.manager.on_request_finished(context)
    assert stack.manager.get_load_source(keys[0], context) is CacheHitSource.HOST


@pytest.mark.parametrize(
    ("matcher", "answers"),
    [
        (TierMatcher(medium=Medium.CPU), [HIT, MISS]),
        (TierMatcher(medium=Medium.STORAGE), [MISS, PENDING]),
        (TierMatcher(locality=Locality.REMOTE), [HIT, MISS]),
    ],
)
def test_a_request_may_name_the_tiers_it_loads_from(
    make: Callable[..., Stack], matcher: TierMatcher, answers: list[LookupResult]
) -> None:
    stack = make(tiers=1, locality=Locality.LOCAL)
    stack.store(keys_of([1]))
    stack.settle()
    stack.forget_the_cpu_tier()
    stack.store(keys_of([2]))
    context = stack.request(load_tier_filter=TierFilter(matchers=(matcher,)))
    assert [stack.manager.lookup(key, context) for key in keys_of([2, 1])] == answers
    stack.settle()


def test_a_row_that_a_rank_did_not_copy_never_becomes_visible(make: Callable[..., Stack]) -> None:
    stack = make(tiers=1)
    keys = keys_of([1, 2, 3])
    context = stack.request(keys)
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    stack.write(output.store_spec)  # type: ignore[arg-type]
    stack.manager.rows_refused([keys[1], *keys_of([77])])
    assert stack.manager.lookup(keys[1], context) is MISS
    stack.manager.complete_store(set(keys), context)
    stack.settle()
    assert [stack.load([key])[0] for key in keys] == [HIT, MISS, HIT]
    assert stack.manager.secondary_tiers[0].native.stats()["rows"] == 2
    stack.store([keys[1]])
    assert stack.load([keys[1]]) == [HIT], "a later store of the row is another one"


def test_rows_that_did_not_fit_a_load_are_misses_and_go_when_their_loads_have_ended(
    make: Callable[..., Stack],
) -> None:
    stack = make()
    keys = keys_of([1, 2])
    stack.store(keys)
    first, second = stack.request(keys), stack.request(keys)
    for context in (first, second):
        assert [stack.manager.lookup(key, context) for key in keys] == [HIT, HIT]
        stack.manager.prepare_load(keys, context)
    stack.step()
    stack.manager.rows_refused(keys)
    assert [stack.manager.lookup(key, first) for key in keys] == [MISS, MISS]
    stack.manager.complete_load(set(keys), first)
    assert [stack.manager.lookup(key, first) for key in keys] == [MISS, MISS]
    assert stack.cpu.stats()["rows"] == 2, "the other load still reads them"
    stack.manager.complete_load(set(keys), second)
    assert stack.cpu.stats()["rows"] == 0
    assert len(stack.store(keys).keys_to_store) == 2


def test_rows_below_that_did_not_fit_a_load_are_not_offered_to_its_request_again(
    make: Callable[..., Stack],
) -> None:
    stack = make(tiers=1)
    keys = keys_of([1, 2])
    stack.store(keys)
    stack.settle()
    context = stack.request(keys)
    assert stack.ask(keys, context) == [HIT, HIT]
    stack.manager.prepare_load(keys, context)
    stack.step()
    stack.manager.rows_refused(keys)
    stack.manager.complete_load(set(keys), context)
    assert stack.cpu.stats()["rows"] == 0
    assert stack.ask(keys, context) == [MISS, MISS], "it would fail again, for ever"
    assert stack.load(keys) == [HIT, HIT], "another request may try"


def test_after_the_end_every_lookup_is_a_miss(make: Callable[..., Stack]) -> None:
    stack = make()
    keys = keys_of([1, 2])
    stack.store(keys)
    context = stack.request(keys)
    assert stack.ask(keys, context) == [HIT, HIT]
    stack.manager.shutdown()
    assert stack.ask(keys, stack.request(keys)) == [MISS, MISS]


class Hanging:
    """A tier below that has what it is told to have, and ends jobs when it is told to."""

    def __init__(self) -> None:
        self.rows: set[bytes] = set()
        self.jobs: list[tuple[int, str, tuple[bytes, ...], tuple[int, ...]]] = []
        self.results: list[Result] = []
        self.busy: list[int] = []
        self.refusing = False

    def lookup(self, keys: list[bytes]) -> list[bool]:
        return [key in self.rows for key in keys]

    def load(self, job_id: int, keys: Any, offsets: Any) -> None:
        if self.refusing:
            raise RuntimeError("planted")
        self.jobs.append((job_id, "load", tuple(keys), tuple(offsets)))

    def store(self, job_id: int, keys: Any, offsets: Any) -> None:
        if self.refusing:
            raise RuntimeError("planted")
        self.jobs.append((job_id, "store", tuple(keys), tuple(offsets)))

    def end(self, outcomes: list[str], busy: list[int] | None = None) -> None:
        job_id, kind, _, offsets = self.jobs.pop(0)
        self.busy += [offsets[position] for position in busy or []]
        good = set(outcomes) <= {"ok", "present"}
        self.results.append(Result(job_id, kind, good, outcomes, busy or []))

    def poll(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    def busy_offsets(self) -> list[int]:
        return list(self.busy)

    def stats(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def reset(self) -> bool:
        return True

    def close(self, timeout_s: float) -> None:  # noqa: ARG002
        if self.busy:
            raise kvstrata.BusyError("busy")


@pytest.fixture
def hanging(make: Callable[..., Stack]) -> tuple[Stack, Hanging]:
    stack = make(tiers=1, slots=4)
    (tier,) = stack.manager.secondary_tiers
    tier.native.close()
    tier.native = Hanging()
    return stack, tier.native


def test_what_a_step_asks_for_starts_at_its_end_in_one_job(hanging: tuple[Stack, Hanging]) -> None:
    stack, tier = hanging
    keys = keys_of([1, 2, 3])
    tier.rows = set(keys)
    context = stack.request(keys)
    assert [stack.manager.lookup(key, context) for key in keys] == [PENDING] * 3
    assert [stack.manager.lookup(key, stack.request()) for key in keys] == [PENDING] * 3
    assert not tier.jobs
    assert stack.cpu.stats()["rows"] == 0, "a lookup takes no slot"
    stack.step()
    assert stack.manager.has_pending_work()
    ((_, kind, asked, offsets),) = tier.jobs
    assert (kind, asked) == ("load", tuple(keys))
    for key, offset in zip(asked, offsets, strict=True):
        stack.arena[offset : offset + ROWS[0]] = bytes_of(key)
    tier.end(["ok"] * 3)
    assert stack.load(keys) == [HIT] * 3
    assert not stack.manager.has_pending_work()


def test_a_row_that_failed_is_a_miss_for_those_who_asked_and_its_neighbours_are_hits(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    keys = keys_of([1, 2, 3])
    tier.rows = set(keys)
    context = stack.request(keys)
    for key in keys:
        stack.manager.lookup(key, context)
    stack.step()
    tier.end(["ok", "corrupt", "ok"])
    stack.step()
    # The tier still says that it has the row: it must not be asked for ever.
    assert [stack.manager.lookup(key, context) for key in keys] == [HIT, MISS, HIT]
    assert stack.cpu.stats()["rows"] == 2


def test_a_slot_that_the_kernel_still_has_is_given_to_nobody(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    keys = keys_of([1, 2])
    tier.rows = set(keys)
    context = stack.request(keys)
    for key in keys:
        stack.manager.lookup(key, context)
    stack.step()
    ((_, _, _, offsets),) = tier.jobs
    tier.end(["ok", "timeout"], busy=[1])
    stack.step()
    assert [stack.manager.lookup(key, context) for key in keys] == [HIT, MISS]
    stack.step()
    output = stack.store(keys_of([5, 6, 7]))
    assert output is not None
    assert offsets[1] not in output.store_spec.offsets
    while tier.jobs:
        tier.end(["dropped"] * len(tier.jobs[0][2]))
    stack.step()
    assert stack.store(keys_of([20, 21, 22, 23])) is None
    assert not stack.manager.has_pending_work(), "an idle engine would step until the kernel ends"
    tier.busy.clear()
    assert stack.store(keys_of([20, 21, 22, 23])) is not None


def test_a_tier_that_refuses_jobs_costs_a_miss_and_no_slot(hanging: tuple[Stack, Hanging]) -> None:
    stack, tier = hanging
    tier.refusing = True
    tier.rows = set(keys_of([1]))
    stack.store(keys_of([2]))
    context = stack.request()
    assert stack.manager.lookup(keys_of([1])[0], context) is PENDING
    stack.settle()
    assert stack.manager.lookup(keys_of([1])[0], context) is MISS
    assert stack.in_use() == 0
    assert stack.manager.secondary_tiers[0].faults.total == 2


def test_rows_that_wait_for_a_slow_tier_do_not_take_the_whole_arena(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    (below,) = stack.manager.secondary_tiers
    below.store_bytes_max = ROWS[0]
    for number in range(6):
        assert stack.store(keys_of([number])) is not None
    assert len(tier.jobs) == 1
    assert below.skipped_stores == 5
    tier.end(["ok"])
    stack.step()
    stack.store(keys_of([9]))
    assert len(tier.jobs) == 1
    tier.end(["ok"])
    stack.step()


def test_a_reset_keeps_slots_until_workers_and_tiers_are_done(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    stack.store(keys_of([1]))  # waits below
    context = stack.request(keys_of([2]))
    stack.manager.prepare_store(keys_of([2]), context)  # the workers copy
    tier.rows = set(keys_of([3]))
    stack.manager.lookup(keys_of([3])[0], context)  # wanted, and not started
    stack.manager.reset_cache()
    assert stack.load(keys_of([1, 2])) == [MISS, MISS]
    assert stack.cpu.stats()["orphaned_rows"] == 2
    assert stack.store(keys_of([5, 6, 7])) is None
    stack.manager.on_reset_flushed()
    assert stack.cpu.stats()["orphaned_rows"] == 1
    tier.end(["dropped"])
    stack.step()
    assert stack.cpu.stats()["orphaned_rows"] == 0
    tier.rows.clear()
    assert stack.store(keys_of([5, 6, 7, 8])) is not None
    tier.end(["ok"] * 4)
    stack.step()


def test_a_row_that_did_not_fit_a_load_goes_when_the_tier_below_has_read_it(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    keys = keys_of([1])
    stack.store(keys)  # waits below
    context = stack.request(keys)
    assert stack.ask(keys, context) == [HIT]
    stack.manager.prepare_load(keys, context)
    stack.step()
    stack.manager.rows_refused(keys)
    stack.manager.complete_load(set(keys), context)
    stack.step()
    assert stack.load(keys) == [MISS]
    assert stack.cpu.stats()["rows"] == 1
    tier.end(["ok"])
    stack.step()
    assert stack.cpu.stats()["rows"] == 0
    assert len(stack.store(keys).keys_to_store) == 1
    assert stack.load(keys) == [HIT], "the row of a later store was taken for the refused one"
    tier.end(["ok"])
    stack.step()


def test_a_tier_that_is_still_busy_keeps_the_arena(make: Callable[..., Stack]) -> None:
    stack = make(tiers=1)
    (below,) = stack.manager.secondary_tiers
    native, below.native = below.native, Hanging()
    below.native.busy = [0]
    stack.manager.shutdown()
    assert stack.released == 0
    native.close()
    stack.released = 1


def test_before_it_is_open_it_finds_and_stores_nothing() -> None:
    stack = Stack()
    context = stack.request()
    keys = keys_of([1])
    assert stack.manager.lookup(keys[0], context) is MISS
    output = stack.manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == []
    stack.manager.complete_store(set(), context)
    stack.manager.on_schedule_end(END)
    stack.manager.reset_cache()
    assert stack.manager.get_stats() is None
    assert not stack.manager.has_pending_work()
    stack.manager.shutdown()
    assert stack.manager.faults.total == 0


def test_other_bytes_after_the_start_end_the_service_for_good(make: Callable[..., Stack]) -> None:
    stack = make()
    keys = keys_of([1])
    stack.store(keys)
    stack.manager.open({})
    assert stack.load(keys) == [HIT]
    stack.manager.open({"other": 1})
    assert stack.load(keys) == [MISS]
    assert stack.store(keys_of([2])).keys_to_store == []


def test_a_store_that_ends_after_such_a_change_leaves_no_row_anywhere(
    make: Callable[..., Stack],
) -> None:
    stack = make(tiers=1)
    keys = keys_of([1])
    context = stack.request(keys)
    stack.manager.prepare_store(keys, context)
    stack.manager.open({"other": 1})
    stack.manager.complete_store(set(keys), context)
    stack.settle()
    assert stack.cpu.stats()["rows"] == 0
    assert stack.manager.secondary_tiers[0].native.stats()["rows"] == 0


def test_events_tell_what_came_and_went_in_every_tier(make: Callable[..., Stack]) -> None:
    stack = make(tiers=1, slots=1, events=True, wants_events=True)
    stack.store(keys_of([1]))
    stack.settle()
    stack.store(keys_of([2]))
    stack.settle()
    events = [(one.medium, one.removed, one.keys) for one in stack.manager.take_events()]
    assert sorted(events, key=str) == sorted(
        [
            (Medium.CPU, False, keys_of([1])),
            (Medium.CPU, True, keys_of([1])),
            (Medium.CPU, False, keys_of([2])),
            (Medium.STORAGE, False, keys_of([1])),
            (Medium.STORAGE, False, keys_of([2])),
        ],
        key=str,
    )
    assert list(stack.manager.take_events()) == []


def test_every_metric_it_reports_is_declared(make: Callable[..., Stack]) -> None:
    stack = make(tiers=1)
    stack.store(keys_of([1]))
    stack.settle()
    stats = stack.manager.get_stats()
    assert stats is not None
    declared = {**metrics.cpu_definitions(), **metrics.definitions()}
    assert {one.key for one in metrics.CPU_METRICS} <= {
        *stack.manager._snapshot(),
    }
    reported = {name.split(":(")[0] for name in stats.reduce()}
    emitted = {name for name in reported if "kvstrata" in name}
    assert "vllm:kvstrata_cpu_rows" in emitted
    assert emitted <= set(declared)


def test_any_order_of_calls_leaves_no_slot_in_use_and_gives_no_wrong_bytes(
    make: Callable[..., Stack],
) -> None:
    chance = random.Random(5)
    stack = make(tiers=1, slots=6)
    for _ in range(300):
        group = chance.choice([0, 3])
        start, count = chance.randrange(20), chance.randrange(1, 5)
        keys = keys_of(range(start, start + count), group)
        what = chance.randrange(10)
        if what < 4:
            stack.store(keys)
        elif what < 8:
            stack.load(keys)
        elif what < 9:
            stack.step()
        elif chance.random() < 0.3:
            stack.forget_the_cpu_tier()
    stack.settle()
    assert stack.in_use() == 0
    assert stack.cpu.stats()["orphaned_rows"] == 0


def test_how_a_store_ended_says_nothing_of_the_store_of_that_row_after_a_reset(
    hanging: tuple[Stack, Hanging],
) -> None:
    stack, tier = hanging
    (below,) = stack.manager.secondary_tiers
    keys = keys_of([1, 2])
    stack.store(keys)
    assert below.wanted([*keys, *keys_of([3])]) == keys_of([3]), "stored twice at a time"
    stack.manager.reset_cache()
    assert below.reset()
    stack.store(keys)
    assert [set(job[2]) for job in tier.jobs] == [set(keys)] * 2
    tier.end(["dropped"] * 2)
    stack.step()
    assert below.offered_again(keys) == [], "the later job stores them"
    assert below.wanted(keys) == []
    tier.end(["ok", "dropped"])
    stack.step()
    (dropped,) = below.offered_again(keys)
    assert below.wanted(keys) == keys
    stack.store(keys_of([3]))
    assert below.offered_again(keys) == [dropped]
    tier.end(["ok"])
    stack.step()
