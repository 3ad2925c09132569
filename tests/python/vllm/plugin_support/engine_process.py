"""Runs a program with an engine in it, and takes away what vLLM itself leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARED_MEMORY = Path("/dev/shm")
# Memory through which vLLM's CPU ranks exchange sums. It has no owner that removes it.
OF_VLLM = "vllm_dist_*-cpushm_*"


def report_of(program: Path, arguments: Sequence[str], timeout_s: float, **environment: str) -> Any:
    """The JSON that a program prints last; two ranks may share the machine's cores."""
    settings = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Binding ranks to cores by itself needs a NUMA node for each.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    before = set(SHARED_MEMORY.glob(OF_VLLM))
    try:
        ran = subprocess.run(
            [sys.executable, str(program), *arguments],
            env=settings,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    finally:
        _remove_unused(set(SHARED_MEMORY.glob(OF_VLLM)) - before)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return json.loads(ran.stdout.strip().splitlines()[-1])


def _remove_unused(files: set[Path]) -> None:
    """Files that no process maps any more."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    for file in files:
        if str(file) not in mapped:
            file.unlink(missing_ok=True)
