"""The metrics that the tier declares are statistics that are documented, and those it has."""

import re
from pathlib import Path

import kvstrata
from kvstrata.vllm.metrics import CPU_METRICS, METRICS

DOCS = Path(__file__).parents[3] / "docs"
OF_THE_PLUGIN = {"faults", "disabled", "degraded"}


def test_every_metric_is_a_statistic_that_a_tier_has(tmp_path: Path) -> None:
    arena = bytearray(4096 * 4)
    with kvstrata.open_tier(
        tmp_path / "kv",
        manifest={"model": "m"},
        row_bytes=4096,
        arena=arena,
        capacity=1 << 20,
        min_free=0,
    ) as tier:
        stats = tier.stats()
    for metric in METRICS:
        if metric.key in OF_THE_PLUGIN:
            continue
        found: object = stats
        for part in metric.key.split("."):
            assert isinstance(found, dict), metric
            found = found[part]
        assert isinstance(found, (int, float)), metric


def test_every_metric_is_named_in_the_documentation_once() -> None:
    section = (DOCS / "VLLM.md").read_text().split("\n## Metrics\n", 1)[1].split("\n## ", 1)[0]
    named: list[str] = []
    for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        stem = ""
        for name in re.findall(r"`([^`]+)`", cell):
            if name.startswith("..._"):
                named.append(stem + name.removeprefix("..."))
                continue
            stem = "_".join(name.split("_")[:2])
            named.append(name)
    hops = ("load", "store", "read_wait", "read", "write_wait", "write")
    spelled = [name.replace("<hop>", hop) for name in named for hop in hops]
    assert sorted(set(spelled)) == sorted(
        metric.name.removeprefix("vllm:kvstrata_tier_") for metric in METRICS
    )
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_metric_of_the_cpu_tier_is_named_in_the_documentation_once() -> None:
    text = (DOCS / "VLLM.md").read_text()
    section = text.split("\n## Metrics of the CPU tier\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    prefix = "vllm:kvstrata_cpu_"
    assert sorted(named) == sorted(metric.name.removeprefix(prefix) for metric in CPU_METRICS)
