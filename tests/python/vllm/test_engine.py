"""A real engine on vLLM's CPU build: stored rows come back from the tier as the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_support.overlay import overlaid

import kvstrata

PROGRAM = Path(__file__).parent / "plugin_support" / "engine_round_trip.py"
PACKAGE = Path(__file__).parents[3] / "python"


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine")
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_a_prompt_the_engine_forgot_comes_back_from_the_tier(shape: str, tmp_path: Path) -> None:
    native = hasattr(kvstrata, "_native")
    model = tmp_path / shape
    model.mkdir()
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        **({} if native else {"PYTHONPATH": os.pathsep.join(paths)}),
    }
    command = [
        sys.executable,
        str(PROGRAM),
        shape,
        str(model),
        f"file://{tmp_path}/kv",
        "native" if native else "stand_in",
    ]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    report = json.loads(ran.stdout.strip().splitlines()[-1])
    assert report["enabled"], "the connector's facts did not suffice to persist anything"
    assert report["faults"] == 0
    assert min(report["cached"]) >= 480, "the prompts were computed again"
    assert report["same"]
    assert len({tuple(tokens) for tokens in report["tokens"]}) == 2, "the prompts give one output"
    assert not report["left"], "something was left in shared memory"
