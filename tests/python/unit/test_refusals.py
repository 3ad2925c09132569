"""What any call refuses: one message of ours that names the argument, and no note beside it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest

import kvstrata
from kvstrata._native import CacheOrder, CpuTier, Fingerprint, LruOrder, RequestBook, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = 4096
WORDS_32 = "an int from 0 to 2**32 - 1 is expected"
WORDS_64 = "an int from 0 to 2**64 - 1 is expected"
NO_SIZE = (
    'is not a size; a str such as "10GiB" or "80%", or an int of bytes from 0 to 2**64 - 1, '
    "is expected"
)
POSITIVE = "a number of seconds, more than 0, is expected"
FLAG = "True or False is expected"
REQUEST = b'{"timestamp":%d,"input_length":1024,"output_length":1,"hash_ids":[1,2]}\n'


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The message of the refusal of a call; it is whole: `PyO3` adds notes to what it raises."""
    with pytest.raises((kvstrata.ArgumentError, kvstrata.ConfigError)) as raised:
        call(*arguments, **named)
    assert getattr(raised.value, "__notes__", []) == []
    return str(raised.value)


def book(**changed: Any) -> RequestBook:
    given: dict[str, Any] = {
        "cpu": CpuTier(1 << 20, ROW),
        "tiers": [],
        "tokens_per_chunk": [(0, 16)],
        "answers": [0, 1, 2, 3],
        "sources": ["cpu"],
        "everywhere": None,
        "allowed": lambda _context: (True, 0),
        "wait_s": 1.0,
        "share": 500,
        "request_share": 100,
    }
    return RequestBook(**{**given, **changed})


NOT_32 = [-1, 2**32, 1.5, "1", True, b"1"]


@pytest.mark.parametrize("value", NOT_32, ids=repr)
def test_counts_of_tokens_are_named_where_they_are_none(bench: Any, value: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    for name in ("prompt_tokens", "new_tokens"):
        known = {"prompt_tokens": 1, "new_tokens": 1, name: value}
        for call in (
            lambda known=known: tier.observe("one", keys, **known),
            lambda known=known: book().observe(object(), [keys], 1.0, **known),
        ):
            assert refusal(call) == f"{name} is {value!r}; {WORDS_32}"
    for call in (lambda: tier.finish("one", value), lambda: book().end(object(), value)):
        assert refusal(call) == f"output_tokens is {value!r}; {WORDS_32}"


def test_the_largest_counts_are_taken(bench: Any) -> None:
    tier = bench.open()
    most = 2**32 - 1
    tier.observe("one", bench.keys([1]), prompt_tokens=most, new_tokens=most)
    tier.finish("one", most)


@pytest.mark.parametrize("value", [5, None, b"one", "\ud800"], ids=repr)
def test_a_request_is_named_by_text(bench: Any, value: Any) -> None:
    tier = bench.open()
    expected = f"request_id is {value!r}; a str is expected"
    assert refusal(tier.observe, value, [], prompt_tokens=1, new_tokens=1) == expected
    assert refusal(tier.finish, value, 1) == expected


def test_a_hint_is_text(bench: Any) -> None:
    tier = bench.open()
    told = refusal(tier.observe, "one", [], prompt_tokens=1, new_tokens=1, hint=5)
    assert told == "hint is 5; a str is expected"
    assert refusal(book().observe, object(), [], 1.0, hint=b"x").startswith("hint is b'x'; ")


def test_refusals_of_a_tier_have_no_notes(bench: Any) -> None:
    tier = bench.open()
    for call in (tier.lookup, tier.touch, tier.remove):
        for keys, kind in ((5, "int"), (b"one key", "bytes"), ("one key", "str")):
            told = f"keys is {kind}; a sequence of keys, each of type bytes, is expected"
            assert refusal(call, keys) == told
    for call in (tier.store, tier.load):
        assert refusal(call, -1, [], []).startswith("job_id is -1 ")
        assert refusal(call, 1, 5, []).startswith("keys is int; ")
        assert refusal(call, 1, [], 5).startswith("offsets is int; ")
        told = "a byte offset, an int from 0 to 2**64 - 1, is expected"
        for offset in (-1, 2**64):
            assert refusal(call, 1, bench.keys([1]), [offset]) == f"offsets[0] is {offset}; {told}"
    for call in (tier.wait, tier.close):
        assert refusal(call, "x").startswith("timeout_s is 'x'; ")


def test_refusals_at_open_have_no_notes(root: Any) -> None:
    good: dict[str, Any] = {
        "url": str(root),
        "manifest": {"model": "m"},
        "row_bytes": ROW,
        "arena": mmap.mmap(-1, 8 * ROW),
        "capacity": "1MiB",
    }
    for name, value, told in (
        ("url", "foo://x", "url: the scheme of "),
        ("url", 5, "url is 5; "),
        ("manifest", 5, "manifest is 5 "),
        ("manifest", {"model": {1: 2}}, "a key of manifest.model is 1 "),
        ("row_bytes", "x", "row_bytes is 'x'; "),
        ("arena", b"", "arena (bytes) is read-only; "),
        ("row_bytes", 2**70, f"row_bytes is {2**70}; an int of bytes from 1 to 2**30 is expected"),
        ("arena", bytearray(10), f"arena: 10 bytes hold no row of group 0, which has {ROW} bytes"),
        ("capacity", -1, f"capacity: -1 {NO_SIZE}"),
        ("capacity", 2**70, f"capacity: {2**70} {NO_SIZE}"),
        ("capacity", "180%", 'capacity: "180%" is more than 100%'),
        ("min_free", "many", "min_free: "),
        ("min_free", "180%", 'min_free: "180%" is more than 100%'),
        ("deadline_s", "x", "deadline_s is 'x'; "),
        ("deadline_s", -1, f"deadline_s is -1; {POSITIVE}"),
        ("deadline_s", 0, f"deadline_s is 0; {POSITIVE}"),
        ("required", 1, "required is 1; "),
        ("theta", 2, "theta is 2; "),
        ("tracked_keys", 0, "tracked_keys is 0; "),
        ("endpoint", 1, "endpoint is 1; "),
    ):
        assert refusal(kvstrata.open_tier, **{**good, name: value}).startswith(told)
    assert list(root.iterdir()) == []


def test_refusals_of_gc_have_no_notes() -> None:
    collect = kvstrata.collect_garbage
    assert refusal(collect, 5, capacity=0).startswith("url is 5; ")
    for name, value in (("older_than_s", -1), ("dry_run", 1), ("deadline_s", "x"), ("region", 1)):
        told = refusal(collect, "memory://x", **{"capacity": 0, name: value})
        assert told.startswith(f"{name} is {value!r}; ")


def test_refusals_of_manifests_have_no_notes() -> None:
    assert refusal(kvstrata.manifest_digest, 5).startswith("manifest is 5 ")
    for pair in ((5, {}), ({}, 5)):
        assert refusal(kvstrata.manifest_differences, *pair)
    assert refusal(Fingerprint().update, "x") == "data is str; bytes are expected"


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "1", True], ids=repr)
def test_sizes_of_a_cpu_tier_and_of_orders_are_named_where_they_are_none(value: Any) -> None:
    told = f"{value!r}; {WORDS_64}"
    assert refusal(CpuTier, value, ROW) == f"arena_bytes is {told}"
    assert refusal(CpuTier, 1 << 20, ROW, align=value) == f"align is {told}"
    assert refusal(LruOrder, value) == f"capacity is {told}"
    assert refusal(CacheOrder, "lru", value, tail_first=True) == f"capacity is {told}"
    for order in (LruOrder(4), CacheOrder("lru", 4, tail_first=True)):
        assert refusal(order.evict, value, set()) == f"n is {told}"


def test_arguments_of_a_cpu_tier_and_of_orders_are_named() -> None:
    tier = CpuTier(1 << 20, ROW)
    sequence = "a sequence of ints from 0 to 2**64 - 1 is expected"
    for handles in ([-1], [2**64], 5, "x"):
        for call in (tier.let_go, tier.abandon):
            assert refusal(call, handles) == f"handles is {handles!r}; {sequence}"
    assert refusal(tier.let_go, [], success=1) == f"success is 1; {FLAG}"
    assert refusal(tier.complete_store, [], success=1) == f"success is 1; {FLAG}"
    assert refusal(tier.prepare_store, [], below="x") == f"below is 'x'; {FLAG}"
    keys = (tier.lookup, tier.prepare_store, tier.prepare_load, tier.complete_load, tier.forget)
    for call in (*keys, tier.complete_store, tier.hold_ready):
        assert refusal(call, 5).startswith("keys is int; ")
    order = CacheOrder("lru", 4, tail_first=True)
    assert refusal(CacheOrder, 5, 4, tail_first=True) == "policy is 5; a str is expected"
    assert refusal(CacheOrder, "lru", 4, tail_first=1) == f"tail_first is 1; {FLAG}"
    for call in (LruOrder(4).touch, order.touch, order.miss):
        assert refusal(call, 5) == "keys is 5; a sequence is expected"
    assert refusal(order.end, 5, set(), set()) == "keys is 5; a sequence is expected"


def test_more_victims_than_there_are_keys_are_not_there() -> None:
    for order in (LruOrder(4), CacheOrder("lru", 4, tail_first=True)):
        for count in (1, 2**40, 2**63, 2**64 - 1):
            assert order.evict(count, set()) is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cpu", 5, "cpu is int; a CpuTier is expected"),
        ("tiers", 5, "tiers is 5; a sequence is expected"),
        ("sources", 5, "sources is 5; a sequence is expected"),
        ("answers", [1], "answers has 1 values; four are expected"),
        ("wait_s", "x", "wait_s is 'x'; a number of seconds is expected"),
        ("wait_s", float("nan"), "wait_s is nan; a number of seconds is expected"),
        ("share", -1, f"share is -1; {WORDS_32}"),
        ("request_share", 2**32, f"request_share is {2**32}; {WORDS_32}"),
        (
            "tokens_per_chunk",
            [(0, -16)],
            "tokens_per_chunk is [(0, -16)]; a sequence of pairs of ints is expected",
        ),
    ],
)
def test_arguments_of_a_request_book_are_named(name: str, value: Any, expected: str) -> None:
    assert refusal(book, **{name: value}) == expected


def test_arguments_of_a_request_books_calls_are_named() -> None:
    own = book()
    assert refusal(own.observe, object(), 5, 1.0).startswith("groups is int; ")
    assert refusal(own.observe, object(), [5], 1.0).startswith("keys is int; ")
    for now in ("x", float("inf"), True):
        told = f"now is {now!r}; a number of seconds is expected"
        assert refusal(own.observe, object(), [], now) == told
        assert refusal(own.end_step, now) == told
    for at, name in enumerate(("handles", "lost", "busy")):
        arguments: list[Any] = [[], [], []]
        arguments[at] = [-1]
        assert refusal(own.load_ended, [], *arguments).startswith(f"{name} is [-1]; ")
    assert refusal(own.complete_store, [], object(), success=1) == f"success is 1; {FLAG}"


def test_arguments_of_a_replay_are_named() -> None:
    trace = Trace(REQUEST % 0 + REQUEST % 1000)
    assert refusal(Trace, "x") == "text is str; bytes are expected"
    assert trace.requests == 2
    for value in (-1, 2**64, 1.5, "1"):
        assert refusal(trace.optimum, value) == f"capacity is {value!r}; {WORDS_64}"
        for name in ("capacity", "gpu_blocks", "below_capacity", "directory"):
            told = refusal(trace.replay, **{"policy": "lru", "capacity": 4, name: value})
            assert told == f"{name} is {value!r}; {WORDS_64}"
    for name in ("theta", "below_theta"):
        for value in (-0.5, 2, float("nan"), "x"):
            told = refusal(trace.replay, "lru", 4, **{name: value})
            assert told == f"{name} is {value!r}; a probability from 0 to 1 is expected"
    for value in NOT_32:
        told = refusal(trace.replay, "lru", 4, store_threshold=value)
        assert told == f"store_threshold is {value!r}; {WORDS_32}"
    for name in ("head_untold", "told_late"):
        assert refusal(trace.replay, "lru", 4, **{name: 1}) == f"{name} is 1; {FLAG}"
    assert refusal(trace.replay, 5, 4) == "policy is 5; a str is expected"
    assert refusal(trace.replay, "lru", 4, below_policy=5) == "below_policy is 5; a str is expected"
    least = "is 0; a tier has room for one block at least"
    assert refusal(trace.replay, "lru", 0) == f"capacity {least}"
    assert refusal(trace.replay, "lru", 4, below_policy="lru") == f"below_capacity {least}"
    assert refusal(trace.replay, "lru", 4, each=5) == "each is 5; a list is expected"
    counts = trace.replay("lru", 2**64 - 1, gpu_blocks=2**64 - 1, directory=2**64 - 1)
    assert counts["requests"] == 2


class Boastful(list[Any]):
    """Says that it has more than there is memory for."""

    def __len__(self) -> int:
        return 2**62


def test_a_sequence_is_believed_what_it_has_not_what_it_says_it_has() -> None:
    tier = CpuTier(1 << 20, ROW)
    tier.let_go(Boastful([1, 2]))
    tier.abandon(Boastful())
    LruOrder(4).touch(Boastful([b"a"]))
    made = book(cpu=tier, tokens_per_chunk=Boastful([(0, 16)]), sources=Boastful(["cpu"]))
    assert made.load_ended(Boastful(), Boastful(), Boastful([0]), Boastful()) == []


def test_a_book_may_be_asked_by_what_it_asks_which_tiers_are_allowed() -> None:
    def allowed(_context: object) -> tuple[bool, int]:
        return made.stats()["requests"] == 0, 0

    made = book(allowed=allowed)
    context = type("Context", (), {"load_tier_filter": object()})()
    assert made.lookup(bytes(32) + bytes(4), context) == 0
    assert made.stats()["requests"] == 1
