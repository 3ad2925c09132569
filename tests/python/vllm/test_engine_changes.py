"""Real engines on one root: what changes the bytes reloads nothing, and what does not, everything.

Two routes: the whole stack, and our tier under `KVStrataConnector` with vLLM's own spec, of which
only the worker is replaced, because vLLM's does not run on its CPU build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plugin_support.engine_process import report_of
from plugin_support.overlay import overlaid

import kvstrata
from kvstrata.cli import main as entry

PROGRAM = Path(__file__).parent / "plugin_support" / "engine_variants.py"
FULL = 192  # of 200 tokens: all full blocks of 32, and of 64

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
    pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine"),
]

ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
CHANGES: dict[str, dict[str, Any]] = {
    "rope factor": {"hf_overrides": ROPE},
    "element type": {"dtype": "bfloat16"},
    "epsilon of the norms": {"hf_overrides": {"rms_norm_eps": 0.1}},
    "block size": {"block_size": 64},
}
# vLLM's file tier names one directory for these, whatever the bytes are.
UNNAMED_BY_VLLM = {"rope factor", "epsilon of the norms", "one weight", "activation"}


def run(work: Path, runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    reports = report_of(
        PROGRAM,
        [str(work), json.dumps(runs)],
        1780,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    for report in reports:
        assert report.get("enabled", True), report
        assert report.get("faults", 0) == 0, report
    return {report["name"]: report for report in reports}


def llama(name: str, route: str | None, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "model": "llama", "route": route, "arguments": arguments}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One change per route."""
    work = tmp_path_factory.mktemp("changes")
    rope, dtype = CHANGES["rope factor"], CHANGES["element type"]
    reports = run(
        work,
        [
            llama("stack", "stack"),
            llama("stack, ranks as processes", "stack", distributed_executor_backend="mp"),
            {**llama("stack, changed", "stack", **rope), "recompute": True},
            llama("tier", "tier"),
            llama("tier again", "tier"),
            {**llama("tier, changed", "tier", **dtype), "recompute": True},
        ],
    )
    return {"work": work, **reports}


def test_nothing_changed_reloads_everything_though_ranks_run_as_processes_now(
    short: dict[str, Any],
) -> None:
    first, second = short["stack"], short["stack, ranks as processes"]
    assert first["cached"] == 0
    assert second["cached"] == FULL
    assert second["tokens"] == first["tokens"]
    assert second["namespaces"] == first["namespaces"]


def test_a_real_workers_backend_and_instruction_set_are_in_its_byte_map(
    short: dict[str, Any],
) -> None:
    (name,) = short["stack"]["namespaces"]
    manifest = json.loads((short["work"] / "kv" / name / "namespace.json").read_text())["manifest"]
    (backend,) = manifest["byte_map"]["kernels"]
    assert re.fullmatch(r"CPU_ATTN \((amx|vec|vec16|neon|rvv|vsx|vxe)\)", backend)


def test_another_rope_factor_reloads_nothing_and_answers_as_after_a_reset(
    short: dict[str, Any],
) -> None:
    changed = short["stack, changed"]
    assert changed["cached"] == 0
    assert changed["tokens"] == changed["recomputed"]
    assert changed["tokens"] != short["stack"]["tokens"]
    assert changed["vllm_directory"] == short["stack"]["vllm_directory"]


def test_under_vllms_own_spec_nothing_changed_reloads_everything_and_nothing_of_the_whole_stacks(
    short: dict[str, Any],
) -> None:
    assert short["tier"]["cached"] == 0, "rows of a proven byte map were taken for unproved ones"
    assert short["tier again"]["cached"] == FULL
    assert short["tier again"]["tokens"] == short["tier"]["tokens"] == short["stack"]["tokens"]


def test_under_vllms_own_spec_another_element_type_reloads_nothing(short: dict[str, Any]) -> None:
    changed = short["tier, changed"]
    assert changed["cached"] == 0
    assert changed["tokens"] == changed["recomputed"]
    assert set(changed["namespaces"]) - set(short["tier again"]["namespaces"])


def test_the_difference_of_two_real_namespaces_is_the_rope_factor(
    short: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root = short["work"] / "kv"
    (first,) = short["stack"]["namespaces"]
    (second,) = set(short["stack, changed"]["namespaces"]) - {first}
    capsys.readouterr()
    assert entry.main(["ls", "--json", "--diff", str(root / first), str(root / second)]) == 1
    differing = {
        item["field"]: (item["a"], item["b"]) for item in json.loads(capsys.readouterr().out)
    }
    assert differing.pop("overrides.rope_parameters") == (None, ROPE["rope_parameters"])
    assert differing.pop("config.full.rope_parameters.factor") == (None, 2.0)
    assert differing.pop("config.full.rope_parameters.rope_type") == ("default", "linear")
    assert not differing


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every change on both routes, each beside an engine without a cache."""
    work = tmp_path_factory.mktemp("all-changes")
    runs = [llama("base", None)]
    for route in ("stack", "tier"):
        runs += [llama(f"{route}: base", route), llama(f"{route}: again", route)]
        runs += [llama(f"{route}: {name}", route, **CHANGES[name]) for name in CHANGES]
    runs += [llama(name, None, **CHANGES[name]) for name in CHANGES]
    reports = run(work, runs)
    change_one_weight(work / "llama" / "model.safetensors")
    one = {"model": "llama"}
    opt = {"model": "opt"}
    gelu = {"model": "opt", "arguments": {"hf_overrides": {"activation_function": "gelu"}}}
    for route in ("stack", "tier"):
        reports |= run(
            work,
            [
                {"name": f"{route}: one weight", "route": route, **one},
                {"name": f"{route}: opt", "route": route, **opt},
                {"name": f"{route}: opt again", "route": route, **opt},
                {"name": f"{route}: activation", "route": route, **gelu},
            ],
        )
    reports |= run(work, [{"name": "one weight", **one}, {"name": "activation", **gelu}])
    return reports


def change_one_weight(path: Path) -> None:
    """Replace one number of the first layer's keys by its negative."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    weight = tensors["model.layers.0.self_attn.k_proj.weight"]
    weight[0, 0] = -weight[0, 0]
    save_file(tensors, str(path), metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("route", ["stack", "tier"])
def test_every_change_on_either_route_reloads_nothing_and_answers_as_without_a_cache(
    long: dict[str, Any], route: str
) -> None:
    for name in [*CHANGES, "one weight", "activation"]:
        changed, alone = long[f"{route}: {name}"], long[name]
        assert changed["cached"] == 0, name
        assert changed["tokens"] == alone["tokens"], name
    for base in ("", "opt "):
        first = long[f"{route}: {base.strip() or 'base'}"]
        again = long[f"{route}: {base}again"]
        assert first["cached"] == 0
        assert again["cached"] == FULL
        assert again["tokens"] == first["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("route", ["stack", "tier"])
def test_vllms_file_tier_names_one_directory_where_the_bytes_are_not_the_same(
    long: dict[str, Any], route: str
) -> None:
    for name in UNNAMED_BY_VLLM:
        base = long[f"{route}: {'opt' if name == 'activation' else 'base'}"]
        changed = long[f"{route}: {name}"]
        assert changed["vllm_directory"] == base["vllm_directory"]
        assert set(changed["namespaces"]) - set(base["namespaces"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mla", "llama"])
def test_one_number_of_ranks_loads_what_another_stored_and_answers_as_without_a_cache(
    tmp_path: Path, model: str
) -> None:
    """Latent pages that all ranks hold alike, and heads of all ranks in vLLM's canonical layout.

    What is loaded was summed under the other number of ranks, and sums round differently: later
    tokens may differ from those of an engine of the same size without a cache; the first does not.
    """
    extra = {"canonical_layout": True} if model == "llama" else {}

    def ranks(name: str, count: int, route: str | None, work: str) -> dict[str, Any]:
        arguments = {
            "dtype": "bfloat16" if model == "mla" else "float32",
            "tensor_parallel_size": count,
            "distributed_executor_backend": "mp",
        }
        return {
            "name": name,
            "model": model,
            "route": route,
            "arguments": arguments,
            "extra": extra,
            "root": work,
        }

    found = run(
        tmp_path,
        [
            ranks("1 alone", 1, None, "a"),
            ranks("2 alone", 2, None, "a"),
            ranks("stored by 1", 1, "stack", "a"),
            ranks("1 to 2", 2, "stack", "a"),
            ranks("stored by 2", 2, "stack", "b"),
            ranks("2 to 2", 2, "stack", "b"),
            ranks("2 to 1", 1, "stack", "b"),
        ],
    )
    for ranks_now, stored, loaded in (
        ("2 alone", "stored by 1", "1 to 2"),
        ("1 alone", "stored by 2", "2 to 1"),
        ("2 alone", "stored by 2", "2 to 2"),
    ):
        assert found[stored]["cached"] == 0
        assert found[loaded]["cached"] == FULL
        assert found[loaded]["namespaces"] == found[stored]["namespaces"]
        assert found[loaded]["tokens"][0] == found[ranks_now]["tokens"][0]
    assert found["2 to 2"]["tokens"] == found["stored by 2"]["tokens"] == found["2 alone"]["tokens"]
