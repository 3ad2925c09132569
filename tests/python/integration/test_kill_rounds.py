"""A process that stores, loads and evicts is killed again and again: no wrong row, no leftovers.

`KVSTRATA_TEST_KILL_S` sets for how many seconds (60).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = float(os.environ.get("KVSTRATA_TEST_KILL_S", "60"))
CAPACITY = 24 << 20
WRONG = 77

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 120)]

CHILD = f"""
import hashlib, mmap, random, sys
import kvstrata

ROWS = {{0: 8192, 3: 5000}}
SLOTS, SLOT = 64, 8192
arena = mmap.mmap(-1, SLOTS * SLOT)

def key(number):
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + (number % 2 * 3).to_bytes(4, "big")

def payload(number):
    return hashlib.shake_128(b"row" + key(number)).digest(ROWS[number % 2 * 3])

tier = kvstrata.open_tier(
    sys.argv[1],
    manifest={{"model": "m"}},
    row_bytes=ROWS,
    arena=arena,
    capacity={CAPACITY},
    min_free=0,
)
chance = random.Random(int(sys.argv[2]))
assert tier.stats()["used_bytes"] <= {CAPACITY}
print("open", flush=True)
job = 0
while True:
    job += 1
    first = chance.randrange(20_000)
    numbers = range(first, first + chance.randrange(1, SLOTS + 1))
    keys, offsets = [key(n) for n in numbers], [slot * SLOT for slot in range(len(numbers))]
    if job % 3:
        for slot, number in enumerate(numbers):
            row = payload(number)
            arena[slot * SLOT : slot * SLOT + len(row)] = row
        tier.store(job, keys, offsets)
        tier.wait(30.0)
        continue
    arena[:] = bytes([0xEE]) * len(arena)
    tier.load(job, keys, offsets)
    [result] = tier.wait(30.0)
    for slot, (number, outcome) in enumerate(zip(numbers, result.outcomes)):
        row = payload(number)
        if outcome == "ok" and arena[slot * SLOT : slot * SLOT + len(row)] != row:
            sys.exit({WRONG})
        assert outcome in ("ok", "miss"), outcome
"""


def start(root: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(seed)], stdout=subprocess.PIPE, text=True
    )


def allocated(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in [root, *root.rglob("*")])


def test_a_process_killed_every_moment_leaves_no_wrong_row_and_keeps_its_limit(
    tmp_path: Path,
) -> None:
    root = tmp_path / "kv"
    chance = random.Random(7)
    rounds = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        rounds += 1
        process = start(root, rounds)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            time.sleep(chance.uniform(0.02, 0.5))
            assert process.poll() is None, f"the child ended by itself: {process.returncode}"
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert allocated(root) <= CAPACITY
    assert rounds > 1
    process = start(root, 0)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(root.rglob("*.tmp"))
