"""Which rows a tier takes: those likely to be used again, or asked for before."""

import mmap
import re
import time
from typing import Any

import pytest

import kvstrata
from kvstrata._native import CpuTier

# Keys that come once, and keys that come five times.
ONCE, OFTEN, TIMES = 10_000, 100, 5
ROW = 4096


def offered(bench: Any, tier: Any, keys: list[bytes]) -> list[str]:
    outcomes: list[str] = bench.store(tier, keys).outcomes
    return outcomes


@pytest.mark.parametrize("told", [True, False], ids=["observed", "offered"])
def test_rows_that_are_asked_for_once_are_not_written_under_a_threshold(
    bench: Any, *, told: bool
) -> None:
    tier = bench.open(store_threshold=2, theta=0.0, tracked_keys=30_000)
    numbers = [*range(ONCE), *(ONCE + at for _ in range(TIMES) for at in range(OFTEN))]
    for at in range(0, len(numbers), 50):
        keys = bench.keys(numbers[at : at + 50])
        if told:
            tier.observe(f"r{at}", keys, prompt_tokens=None, new_tokens=None)
        job = bench.job_id()
        tier.store(job, keys, bench.offsets(keys))
        bench.wait(tier, job)
        if told:
            tier.finish(f"r{at}", None)
    stats = tier.stats()
    assert stats["rows"] == stats["store_outcomes"]["ok"] == OFTEN
    assert stats["bytes_stored"] == OFTEN * bench.row_bytes[0]
    assert stats["unadmitted_stores"] == stats["store_outcomes"]["dropped"] == ONCE + OFTEN


def test_a_request_counts_once_wherever_its_lookup_stopped_and_however_often_it_stores(
    bench: Any,
) -> None:
    tier = bench.open(store_threshold=2)
    keys = bench.keys(range(4))
    tier.observe("one", keys, prompt_tokens=64, new_tokens=None)
    for _ in range(3):
        assert offered(bench, tier, keys) == ["dropped"] * 4
    tier.finish("one", 1)
    # Late, as a manager's last store is.
    assert offered(bench, tier, keys) == ["dropped"] * 4
    tier.observe("two", keys[:3], prompt_tokens=48, new_tokens=None)
    assert offered(bench, tier, keys) == ["ok"] * 3 + ["dropped"]


def prompts(tier: Any, bench: Any) -> list[bytes]:
    """Many prompts that come once, few that come back at once; keys of the last of the many."""
    last: list[bytes] = []
    for number in range(1200):
        first = 10_000 + number * 4
        last = bench.keys(range(first, first + 4))
        tier.observe(f"once {number}", last, prompt_tokens=64, new_tokens=None)
        tier.finish(f"once {number}", 1)
        if number % 40 == 0:
            session = bench.keys(range(number * 1000, number * 1000 + 12))
            for turn in (4, 8, 12):
                name = f"turn {number} {turn}"
                tier.observe(name, session[:turn], prompt_tokens=100_000, new_tokens=None)
                tier.finish(name, 1)
    return last


@pytest.mark.parametrize("policy", ["lru", "th"])
def test_rows_that_are_unlikely_to_come_back_are_not_written(bench: Any, policy: str) -> None:
    tier = bench.open(policy=policy, theta=0.05)
    keys = prompts(tier, bench)
    assert offered(bench, tier, keys) == ["dropped"] * 4
    assert tier.stats()["unadmitted_stores"] == 4
    unknown = bench.keys([-1, -2])
    assert offered(bench, tier, unknown) == ["ok", "ok"]
    everything = bench.open(url=bench.root.parent / "other", policy=policy, theta=0.0)
    keys = prompts(everything, bench)
    assert offered(bench, everything, keys) == ["ok"] * 4


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("theta", 1.5, "theta is 1.5; a probability from 0 to 1"),
        ("theta", True, "theta is True; a probability"),
        ("theta", float("nan"), "theta is nan; a probability"),
        ("store_threshold", 0, "store_threshold is 0; an int from 1 to 2**64 - 1"),
        ("tracked_keys", 0, "tracked_keys is 0; an int from 1 to 2**64 - 1"),
        ("directory", "big", "directory is 'big'; an int from 1 to 2**64 - 1"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    bench: Any, option: str, value: Any, why: str
) -> None:
    with pytest.raises(kvstrata.ConfigError, match=re.escape(why)):
        bench.open(**{option: value})
    with pytest.raises(kvstrata.ConfigError, match=re.escape(why)):
        CpuTier(ROW, ROW, **{option: value})


def test_a_bucket_takes_rows_by_the_same_rules() -> None:
    arena = mmap.mmap(-1, 4 * ROW)
    keys = [bytes([number]) * 32 + bytes(4) for number in range(4)]
    with kvstrata.open_tier(
        f"memory://admission-{time.monotonic_ns()}",
        manifest={"model": "m"},
        row_bytes=ROW,
        arena=arena,
        store_threshold=2,
    ) as tier:

        def offered(job: int) -> list[str]:
            tier.store(job, keys, [at * ROW for at in range(4)])
            (result,) = tier.wait(30.0)
            return result.outcomes

        tier.observe("one", keys, prompt_tokens=64, new_tokens=None)
        tier.observe("one", keys, prompt_tokens=64, new_tokens=None)
        assert offered(1) == ["dropped"] * 4
        tier.finish("one", 1)
        tier.observe("two", keys[:2], prompt_tokens=32, new_tokens=None)
        assert offered(2) == ["ok", "ok", "dropped", "dropped"]
        assert tier.stats()["unadmitted_stores"] == 6


def test_the_cpu_tier_takes_rows_of_workers_alone_by_its_rules() -> None:
    tier = CpuTier(8 * ROW, ROW, store_threshold=2)
    keys = [bytes([number]) * 32 + bytes(4) for number in range(3)]
    first: Any = tier.prepare_store(keys[:2])
    assert first[0] == []
    again: Any = tier.prepare_store(keys)
    assert again[0] == [0, 1]
    tier.complete_store(keys)
    assert tier.lookup(keys) == [True, True, False]
    promoted: Any = tier.prepare_store(keys[2:], below=True)
    assert promoted[0] == [0]
    assert tier.stats()["unadmitted_stores"] == 3
