"""Telling a tier of whole requests."""

from typing import Any

import pytest

import kvstrata


@pytest.mark.parametrize("policy", ["lru", "th", "arc_vllm", "s3fifo"])
def test_rows_load_and_go_under_every_policy(bench: Any, policy: str) -> None:
    tier = bench.open(policy=policy)
    keys = bench.keys(range(1, 5))
    for turn in range(1, 4):
        tier.observe(f"turn {turn}", keys, prompt_tokens=64 * turn, new_tokens=None)
        bench.store(tier, keys)
        assert bench.load(tier, keys).outcomes == ["ok"] * 4
        tier.finish(f"turn {turn}", 12)
    assert tier.lookup(keys) == [True] * 4
    tier.remove(keys)
    assert tier.lookup(keys) == [False] * 4


def test_requests_that_are_not_known_or_known_twice_change_nothing(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1, 2])
    tier.finish("never begun", None)
    tier.observe("one", keys, prompt_tokens=None, new_tokens=None, hint="tool_use")
    tier.observe("one", keys, prompt_tokens=32, new_tokens=16, hint="end_of_turn")
    tier.observe("none of its groups", bench.keys([1], group=9), prompt_tokens=1, new_tokens=1)
    tier.finish("one", 3)
    assert tier.lookup(keys) == [False, False]


def test_a_hint_that_is_not_known_is_refused_by_its_name(bench: Any) -> None:
    tier = bench.open()
    with pytest.raises(kvstrata.ArgumentError, match='hint is "soon"'):
        tier.observe("one", bench.keys([1]), prompt_tokens=1, new_tokens=1, hint="soon")


def test_a_closed_tier_is_told_nothing(bench: Any) -> None:
    tier = bench.open()
    tier.close()
    with pytest.raises(kvstrata.ClosedError):
        tier.observe("one", [], prompt_tokens=1, new_tokens=1)
    with pytest.raises(kvstrata.ClosedError):
        tier.finish("one", 1)
