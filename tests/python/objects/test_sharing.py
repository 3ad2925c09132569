"""Two processes with disks of their own share a bucket, and `kvstrata gc` runs beside them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGER_SECONDS = 20.0
SCRIPT = Path(__file__).with_name("sharer_script.py")
# Rows of 8 KiB and a header, 300 keys: gc leaves a third of them.
CAPACITY = 100 * (8192 + 256)
GOOD = {
    f"{tier} {outcome}"
    for tier in ("disk", "bucket")
    for outcome in ("store ok", "store present", "load ok", "load miss")
}


def collect(bench: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstrata.cli", "gc", bench.url, "--json", "--allow-http"]
    limits = ["--capacity", str(CAPACITY), "--endpoint", bench.options["endpoint"]]
    told = subprocess.run(
        [*command, *limits],
        check=True,
        capture_output=True,
        text=True,
    )
    report: dict[str, Any] = json.loads(told.stdout)
    return report


@contextlib.contextmanager
def sharers_of(bench: Any, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, str(SCRIPT), bench.url, bench.options["endpoint"]]
    sharers = [
        subprocess.Popen(
            [*command, str(folder / f"disk-{seed}"), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for seed in (1, 2)
    ]
    try:
        yield sharers
    finally:
        for sharer in sharers:
            sharer.kill()
            sharer.communicate()


def share(bench: Any, folder: Path, seconds: float) -> None:
    with sharers_of(bench, folder) as sharers:
        share_among(sharers, bench, seconds)


def share_among(sharers: list[subprocess.Popen[str]], bench: Any, seconds: float) -> None:
    removed = failed = 0
    begun = time.monotonic()
    # A slow machine takes longer until there is anything to remove.
    while (passed := time.monotonic() - begun) < seconds or (
        removed == 0 and passed < seconds + LONGER_SECONDS
    ):
        report = collect(bench)
        removed += report["removed_rows"]
        failed += report["failed_rows"]
        time.sleep(0.2)
    for sharer in sharers:
        # The end of its input is what ends it.
        printed, _ = sharer.communicate()
        assert sharer.returncode == 0
        told = json.loads(printed)
        assert told["wrong"] == 0, told
        assert told["bad"] == {}, told
        assert set(told["outcomes"]) <= GOOD, told
        assert told["outcomes"]["bucket store ok"] > 0
        assert told["from_peers"] > 0, "nothing came from the other process"
        print(told)
    assert removed > 0, "gc had nothing to do"
    assert failed == 0
    assert collect(bench)["kept_bytes"] <= CAPACITY


def test_two_processes_and_gc_at_a_time_see_no_wrong_byte_and_no_error(
    bench: Any, tmp_path: Path
) -> None:
    share(bench, tmp_path, 4.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_processes_and_gc_for_a_minute_see_no_wrong_byte_and_no_error(
    bench: Any, tmp_path: Path
) -> None:
    share(bench, tmp_path, 60.0)
