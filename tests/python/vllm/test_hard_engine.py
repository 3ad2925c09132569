"""Real engines on vLLM's CPU build under pressure: every answer is what no cache at all gives.

32 requests at a time in a KV space too small for them, aborted ones among them, rows and loads that
fail, a tier that hangs, and resets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_support.overlay import overlaid

import kvstrata

PROGRAM = Path(__file__).parent / "plugin_support" / "hard_engine.py"
REQUESTS = 32
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


def run(work: Path, shape: str, phase: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(work), shape, phase],
        env=environment,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    assert len(found["left"]) == 5
    assert not any(found["left"].values()), found["left"]
    assert not any(found["faults"])
    assert not found["shared memory"]
    return found


def check(found: dict[str, Any], rounds: dict[str, int]) -> None:
    """`rounds`: how many requests were given up in each."""
    cold = found["cold"]
    assert cold["cached"] == [0] * REQUESTS
    assert len({tuple(tokens) for tokens in cold["tokens"]}) == REQUESTS, "prompts answer alike"
    for name in rounds:
        assert found[name]["reasons"] == ["length"], f"a request failed: {name}"
        assert found[name]["tokens"] == cold["tokens"], f"other answers: {name}"
        assert sum(found[name]["cached"]) > 0, f"nothing was reloaded: {name}"
    before, after = found["before a reset"], found["after a reset"]
    assert min(before["cached"]) > 0, "nothing was reloaded before the reset"
    assert after["cached"] == [0] * 4
    assert after["tokens"] == before["tokens"]
    # What is tested did happen.
    near, _ = found["natives"]
    assert near["rows failed"] > 0
    assert near["loads"] > 0
    assert found["seen"]["aborted"] == sum(rounds.values())
    assert found["seen"]["preempted"] > 0
    assert found["stats"]["resets"] == 3


def test_whatever_fails_hangs_or_is_given_up_every_answer_is_the_one_without_a_cache(
    tmp_path: Path,
) -> None:
    check(run(tmp_path, "llama", "short"), {"failing": 8, "hanging": 8})


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama", "gemma3", "lfm2"])
def test_every_shape_answers_as_without_a_cache_and_reloads_nothing_after_a_reset_and_a_restart(
    shape: str, tmp_path: Path
) -> None:
    first = run(tmp_path, shape, "first")
    check(first, {"reloaded": 8, "failing": 8, "hanging": 8, "again": 0})
    later = run(tmp_path, shape, "later")["later"]
    assert later["cached"] == [0] * 4
    assert later["tokens"] == first["after a reset"]["tokens"]
