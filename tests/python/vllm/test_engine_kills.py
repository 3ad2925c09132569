"""A real engine that is killed at random moments leaves nothing of ours: no file, process, memory.

What vLLM itself leaves is what the same kill leaves without us.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
from plugin_support.overlay import overlaid

import kvstrata
from kvstrata.memory import arena as arenas

PROGRAM = Path(__file__).parent / "plugin_support" / "killed_engine.py"
SHARED_MEMORY = Path("/dev/shm")
ARENA = 64 << 20
POINTS = 5
START_S = 240.0
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(overlaid(), reason="another release's sources lie over the engine"),
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
]


def members(session: int) -> list[int]:
    """Processes of a session that are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def holders(label: str) -> list[int]:
    """Processes that map the arena of this label or hold its descriptor."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [str(each.readlink()) for each in (entry / "fd").iterdir()]
            if any(label in link for link in links) or label in (entry / "maps").read_text():
                found.append(int(entry.name))
    return found


def shared_bytes() -> int:
    (line,) = re.findall(r"^Shmem: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(line) * 1024


def files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def kind(name: str) -> str:
    """A file's name without what differs from one start to the next."""
    return re.sub(r"[0-9a-f]{4,}|[0-9]+|-[a-z0-9_]{8}$", "#", name)


def wait_for_line(stream: IO[bytes], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ready, _, _ = select.select([stream], [], [], 0.2)
        if ready:
            line = stream.readline()
            if not line or b'"serving"' in line:
                return bool(line)
    return False


def kill_once(work: Path, what: str, point: int) -> dict[str, Any]:
    """Start an engine, kill all of it at the moment that `point` draws, and say what is left."""
    draw = random.Random(point)
    before = files()
    label = arenas._label(work.name)
    with (work / f"{what}{point}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(work), what],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
            },
        )
        held = False
        try:
            assert child.stdout is not None
            # Every other one is killed while it starts.
            if point % 2:
                time.sleep(draw.uniform(5, 40))
            else:
                assert wait_for_line(child.stdout, START_S), "the engine never served"
                time.sleep(draw.uniform(0, 3))
            held = bool(holders(label))
        finally:
            alive = members(child.pid)
            for pid in draw.sample(alive, len(alive)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
    deadline = time.monotonic() + 20
    while (members(child.pid) or holders(label)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = files() - before
    found = {
        "held": held,
        "processes": members(child.pid),
        "holders": holders(label),
        "kinds": {kind(name) for name in left},
        "ours": {name for name in left if "kvstrata" in name or work.name in name},
    }
    # vLLM's own, which nobody else will remove.
    for name in left:
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()
    return found


def test_an_engine_killed_at_random_moments_leaves_no_more_than_one_without_us(
    tmp_path: Path,
) -> None:
    work = tmp_path / f"kvstrata-kill-{os.getpid()}"
    work.mkdir()
    memory = shared_bytes()
    without = [kill_once(work, "none", point) for point in range(POINTS)]
    with_us = [kill_once(work, "ours", point) for point in range(POINTS)]
    for found in with_us:
        assert not found["processes"]
        assert not found["holders"], "the arena outlives its engine"
        assert not found["ours"]
    theirs = set().union(*(found["kinds"] for found in without))
    ours = set().union(*(found["kinds"] for found in with_us))
    assert ours <= theirs, "files are left that vLLM alone does not leave"
    assert sum(found["held"] for found in with_us) >= 3, "hardly one of them had an arena"
    # Others on the machine take shared memory, too, though hardly half of all arenas.
    assert shared_bytes() < memory + POINTS * ARENA // 2
