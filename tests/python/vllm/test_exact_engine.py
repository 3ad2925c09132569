"""Real engines on vLLM's CPU build whose slots fit their group: from the CPU tier, then from disk.

What comes back is compared with what the engine's own prefix cache gives at the same number of
cached tokens: the same tokens, and the same logprobs of the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.engine_process import report_of
from plugin_support.overlay import overlaid

import kvstrata

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = Path(__file__).parent / "plugin_support" / "exact_engine.py"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


def run(work: Path, shape: str, phase: str, ranks: int = 1) -> dict[str, Any]:
    # Two ranks on two busy cores take seconds for a token.
    limit = 280 if ranks == 1 else 900
    arguments = [str(work), shape, f"file://{work}/kv", phase, str(ranks)]
    found: dict[str, Any] = report_of(PROGRAM, arguments, limit)
    assert not any(found["faults"])
    assert not found["left"], "something was left in shared memory"
    assert found["stats"]["rows_in_use"] == found["stats"]["orphaned_rows"] == 0
    return found


def check(first: dict[str, Any], later: dict[str, Any], cached: Sequence[int]) -> None:
    own = first["own"]
    assert own["cached"] == cached, "the engine's own prefix cache holds something else"
    for name, answers in (("the CPU tier", first["cpu"]), ("disk", later["disk"])):
        assert answers["cached"] == own["cached"], f"from {name} more or less came back"
        assert answers["tokens"] == own["tokens"], f"from {name} other tokens came"
        assert answers["logprobs"] == own["logprobs"], f"from {name} other logprobs came"
    assert len({tuple(tokens) for tokens in own["tokens"]}) == 2, "the prompts give one output"
    (below,) = later["tiers"]
    assert below["load_outcomes"]["ok"] == below["load_keys"] > 0


# Llama: one group. Gemma-3: windows and a full group on the same tensors. MLA: latent pages.
# LFM2: states of 1 KiB beside pages of 16 KiB.
@pytest.mark.parametrize(
    "shape",
    [
        "gemma3",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("mla", marks=pytest.mark.slow),
        pytest.param("lfm2", marks=pytest.mark.slow),
    ],
)
def test_a_forgotten_prompt_comes_back_from_slots_that_fit_and_after_a_restart_from_disk(
    shape: str, tmp_path: Path
) -> None:
    first = run(tmp_path, shape, "first")
    assert first["stats"]["payload_bytes"] == first["tiers"][0]["payload_bytes"]
    check(first, run(tmp_path, shape, "later"), [480, 480])


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_two_ranks_share_the_rows_of_one_arena(shape: str, tmp_path: Path) -> None:
    first = run(tmp_path, shape, "first", ranks=2)
    check(first, run(tmp_path, shape, "later", ranks=2), [480, 480])
