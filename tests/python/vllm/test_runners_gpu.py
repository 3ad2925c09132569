"""The replay on a GPU: cold under the V2 runner, filled under V1, then V2 on the same root.

It has not run yet: no CUDA build of vLLM was at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

PROGRAM = Path(__file__).parent / "plugin_support" / "engine_variants.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not current_platform.is_cuda_alike(), reason="no CUDA build of vLLM is installed"
    ),
]


def run(work: Path, runner: str, route: str | None) -> dict[str, Any]:
    wanted = {"name": runner, "model": "llama", "route": route, "arguments": {"dtype": "bfloat16"}}
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(work), json.dumps([wanted])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    (report,) = json.loads(ran.stdout.strip().splitlines()[-1])
    found: dict[str, Any] = report
    return found


@pytest.mark.parametrize("route", ["stack", "tier"])
def test_a_root_filled_under_one_runner_gives_the_other_its_own_answers(
    tmp_path: Path, route: str
) -> None:
    cold = run(tmp_path, "v2", None)
    filled = run(tmp_path, "v1", route)
    warm = run(tmp_path, "v2", route)
    assert warm["tokens"] == cold["tokens"]
    shared = warm["namespaces"] == filled["namespaces"]
    assert (warm["cached"] > 0) is shared
    if route == "tier":
        assert not shared, "nobody has seen these bytes, and the runner stands in for them"
