"""`tier.stats()`, `tier.capabilities()` and the page that documents them say the same."""

import re
from pathlib import Path
from typing import Any

from kvstrata._native import CpuTier, RequestBook

PAGE = Path(__file__).parents[3] / "docs" / "STATS.md"
OUTCOMES = {"ok", "present", "miss", "corrupt", "no_space", "io_error", "timeout", "dropped"}


def documented(heading: str) -> set[str]:
    """The first column of the table below a heading of the page."""
    section = f"\n{PAGE.read_text()}".split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    named = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    return {name for name in named if not name.startswith("<")}


def keys_of(stats: dict[str, Any]) -> set[str]:
    """The dotted keys, with placeholders for groups, outcomes and hops."""
    found = set()
    for name, value in stats.items():
        if name in {"store_outcomes", "load_outcomes"}:
            assert set(value) == OUTCOMES
            found.add(f"{name}.<outcome>")
        elif name in {"groups", "latency"}:
            placeholder = "<group>" if name == "groups" else "<hop>"
            for inner in value.values():
                found |= {f"{name}.{placeholder}.{key}" for key in inner}
        elif isinstance(value, dict):
            found |= {name} | {f"{name}.{key}" for key in value}
        else:
            found.add(name)
    return found


def test_every_statistic_is_documented_and_every_documented_one_is_there(bench: Any) -> None:
    tier = bench.open()
    bench.store(tier, bench.keys([1]))
    stats = tier.stats()
    told = documented("# Statistics")
    errors = {key for key in told if key.startswith("last_error.")}
    assert keys_of(stats) == told - errors
    assert set(stats["latency"]) == documented("## Latencies")
    assert documented("## Outcomes") == OUTCOMES


def test_every_capability_is_documented_and_every_documented_one_is_there(bench: Any) -> None:
    assert set(bench.open().capabilities()) == listed("Capabilities")


def test_every_statistic_of_the_cpu_tier_is_documented_and_every_documented_one_is_there() -> None:
    tier = CpuTier(1 << 20, {0: 4096, 3: 100})
    told = listed("The CPU tier")
    groups = {name for name in told if name.startswith("rows_of_group.")}
    assert groups == {"rows_of_group.<group>"}
    assert set(tier.stats()) == told - groups | {"rows_of_group"}
    assert tier.stats()["rows_of_group"] == {"0": 0, "3": 0}


def test_every_statistic_of_the_manager_is_documented_and_every_documented_one_is_there() -> None:
    book = RequestBook(
        CpuTier(1 << 20, {0: 4096}),
        [],
        [(0, 16)],
        answers=(0, 1, 2, 3),
        sources=[0],
        everywhere=None,
        allowed=lambda _context: (True, 0),
        wait_s=1.0,
        share=500,
        request_share=750,
    )
    assert set(book.stats()) == listed("The manager")


def listed(heading: str) -> set[str]:
    """What the first column of a section's table names."""
    section = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_a_root_that_cannot_be_used_tells_its_last_error(bench: Any) -> None:
    bench.root.write_text("not a directory")
    tier = bench.open(required=False)
    stats = tier.stats()
    assert stats["health"] == "unusable"
    last = stats["last_error"]
    told = documented("# Statistics")
    assert {f"last_error.{key}" for key in last} == {k for k in told if k.startswith("last_error.")}
    assert last["operation"] == "open"
    assert last["path"].endswith("kv")
    assert keys_of(stats) <= told
    # What was offered is what has an outcome, here as well.
    assert bench.store(tier, bench.keys([1, 2])).outcomes == ["dropped"] * 2
    assert bench.load(tier, bench.keys([1, 2, 3])).outcomes == ["miss"] * 3
    stats = tier.stats()
    assert (stats["store_keys"], stats["load_keys"]) == (2, 3)
    assert stats["store_outcomes"]["dropped"] == 2
    assert stats["load_outcomes"]["miss"] == 3


def test_figures_are_there_before_the_first_job_and_after_a_restart(bench: Any) -> None:
    tier = bench.open()
    stats = tier.stats()
    assert (stats["capacity_bytes"], stats["health"], stats["last_error"]) == (64 << 20, "ok", None)
    bench.store(tier, bench.keys([1, 2]))
    tier.close()
    stats = bench.open().stats()
    assert stats["capacity_bytes"] == 64 << 20
    assert stats["groups"]["0"]["rows"] == 2
    assert stats["groups"]["0"]["pinned_rows"] == 0
    assert stats["used_bytes"] > 2 * 8192


def test_counters_never_go_back_and_latencies_are_counted(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys(range(8))
    before = tier.stats()
    for _ in range(3):
        bench.store(tier, keys)
        bench.load(tier, keys)
        tier.reset()
        after = tier.stats()
        for name, value in before.items():
            if name in {"store_outcomes", "load_outcomes"}:
                assert all(after[name][outcome] >= value[outcome] for outcome in value)
            elif name == "latency":
                for hop, figures in value.items():
                    assert after[name][hop]["count"] >= figures["count"]
                    assert after[name][hop]["sum_seconds"] >= figures["sum_seconds"]
        assert after["store_keys"] == sum(after["store_outcomes"].values())
        assert after["load_keys"] == sum(after["load_outcomes"].values())
        before = after
    latency = before["latency"]
    assert latency["load"]["count"] == latency["store"]["count"] == 3
    for figures in latency.values():
        assert 0 <= figures["p50_seconds"] <= figures["p99_seconds"] <= figures["max_seconds"]
        assert figures["max_seconds"] <= figures["sum_seconds"] + 1e-9
