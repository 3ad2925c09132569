"""A real engine on vLLM's CPU build whose rows come back from a bucket to slots that fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from plugin_support.engine_process import report_of
from plugin_support.overlay import overlaid

import kvstrata
from kvstrata.cli.demo import bucket as demo

TOP = Path(__file__).parents[3]
PROGRAMS = Path(os.environ.get("KVSTRATA_TEST_SERVERS", TOP / ".cache" / "servers" / "bin"))
PROGRAM = Path(__file__).parent / "plugin_support" / "exact_engine.py"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


def run(work: Path, phase: str, bucket: demo.Bucket) -> dict[str, Any]:
    found: dict[str, Any] = report_of(
        PROGRAM,
        [str(work), "gemma3", bucket.url, phase, "1"],
        280,
        KVSTRATA_TEST_ENDPOINT=bucket.endpoint,
        **demo.CREDENTIALS,
    )
    assert not any(found["faults"])
    assert not found["left"], "something was left in shared memory"
    assert found["stats"]["rows_in_use"] == found["stats"]["orphaned_rows"] == 0
    return found


def test_a_forgotten_prompt_comes_back_after_a_restart_from_a_bucket(tmp_path: Path) -> None:
    with demo.serving(PROGRAMS / "weed", tmp_path / "weed", print) as bucket:
        first = run(tmp_path, "first", bucket)
        later = run(tmp_path, "later", bucket)
    own = first["own"]
    assert own["cached"] == [480, 480]
    for answers in (first["cpu"], later["disk"]):
        assert answers == own
    (below,) = later["tiers"]
    assert below["load_outcomes"]["ok"] == below["load_keys"] > 0
