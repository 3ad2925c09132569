"""The main job on a real vLLM: `kvstrata demo --json`, once, with every promise asserted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPTS = 3


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the demo; returns its JSON, its status, and what it left behind."""
    pytest.importorskip("vllm")
    work = tmp_path_factory.mktemp("work")
    shared_before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "kvstrata.cli", "demo", "--json", "--prompts", str(PROMPTS)]
    done = subprocess.run(
        [*command, "--work-dir", str(work)], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    return {
        "report": json.loads(done.stdout),
        "status": done.returncode,
        "progress": done.stderr,
        "left_in_work": list(work.iterdir()),
        "left_in_shared_memory": _orphaned_shared_memory(shared_before),
        "left_processes": _processes_that_name(str(work)),
    }


def _orphaned_shared_memory(before: set[Path]) -> set[Path]:
    """New regions that no process maps: another engine on this machine may have its own."""
    deadline = time.monotonic() + 20
    orphans = set(Path("/dev/shm").iterdir()) - before
    while orphans and time.monotonic() < deadline:
        maps = ""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                maps += (entry / "maps").read_text(errors="replace")
        orphans = {path for path in orphans if path.exists() and f"{path}\n" not in maps}
        time.sleep(1)
    return orphans


def _processes_that_name(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in line:
            found.append(entry.name)
    return found


def test_everything_the_demo_checks_holds(demo: dict[str, Any]) -> None:
    assert demo["report"]["failures"] == []
    assert demo["report"]["passed"] is True
    assert demo["status"] == 0
    assert [model["model"] for model in demo["report"]["models"]] == ["llama", "gemma3"]


def test_each_engine_was_a_process_of_its_own(demo: dict[str, Any]) -> None:
    hygiene = demo["report"]["hygiene"]
    assert hygiene["engine_processes"] == 4
    assert hygiene["distinct_engine_pids"] == 4


@pytest.mark.parametrize("index", [0, 1], ids=["llama", "gemma3"])
def test_prompts_come_back_from_disk_with_identical_tokens(
    demo: dict[str, Any], index: int
) -> None:
    model = demo["report"]["models"][index]
    assert len(model["prompts"]) == PROMPTS
    assert model["reloaded_tokens"] / model["prompt_tokens"] >= 0.9
    assert model["reloaded_share"] == model["reloaded_tokens"] / model["prompt_tokens"]
    assert model["bytes_stored"] > 0
    assert model["bytes_loaded"] > 0
    assert model["cold_first_token_s"] > 0
    assert model["warm_first_token_s"] > 0
    for prompt in model["prompts"]:
        assert prompt["tokens_identical"] is True
        assert prompt["reloaded_tokens"] == prompt["prompt_tokens"] // 128 * 128
        assert prompt["prefix_cache_tokens"] == prompt["reloaded_tokens"]
        assert prompt["logprob_difference_prefix_cache"] == 0.0
        assert prompt["logprob_difference_cold"] < 1e-3


@pytest.mark.parametrize("index", [0, 1], ids=["llama", "gemma3"])
def test_a_row_replaced_behind_the_checksum_changes_the_output(
    demo: dict[str, Any], index: int
) -> None:
    replaced = demo["report"]["models"][index]["teeth"]["replaced_row"]
    assert replaced["row"]["key"] != replaced["row"]["by"]
    assert replaced["row"]["key"][-8:] == replaced["row"]["by"][-8:]
    assert replaced["tokens_changed"] is True
    assert replaced["logprob_difference_cold"] > 0.1


@pytest.mark.parametrize("index", [0, 1], ids=["llama", "gemma3"])
def test_a_byte_flipped_on_disk_is_refused_and_recomputed(demo: dict[str, Any], index: int) -> None:
    flipped = demo["report"]["models"][index]["teeth"]["flipped_byte"]
    assert flipped["loads_refused"] >= 1
    assert flipped["recomputed_tokens"] >= 128
    assert flipped["tokens_identical"] is True
    assert flipped["logprob_difference_cold"] < 1e-3


def test_the_demo_leaves_no_process_no_shared_memory_and_no_file(demo: dict[str, Any]) -> None:
    hygiene = demo["report"]["hygiene"]
    assert hygiene["processes_killed"] == []
    assert hygiene["shared_memory_removed"] == []
    assert demo["left_in_work"] == []
    assert demo["left_in_shared_memory"] == set()
    assert demo["left_processes"] == []


def test_progress_is_shown_while_engines_start(demo: dict[str, Any]) -> None:
    for line in ("llama, cold engine: engine starting", "gemma3, warm engine: engine ready"):
        assert line in demo["progress"]
