"""A process of its own with a disk tier of its own, on a bucket that others use, too.

`sharer_script.py URL ENDPOINT ROOT SEED`: stores and loads rows at random until its input ends, and
then until something came from another process, however slow the machine is; prints what came of it
as JSON. A row is asked of the disk first, then of the bucket. Every byte that a load calls good is
compared.
"""

from __future__ import annotations

import collections
import json
import mmap
import random
import select
import sys
import time
from pathlib import Path
from typing import Any

import kvstrata

ROW_BYTES = 8192
SLOTS = 16
KEYS = 300
LONGER_SECONDS = 15.0
MANIFEST = {"model": "m", "dtype": "bfloat16"}


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(ROW_BYTES)


class Sharer:
    """Two tiers over one arena."""

    def __init__(self, url: str, endpoint: str, root: str, seed: int) -> None:
        self.arena = mmap.mmap(-1, SLOTS * ROW_BYTES)
        common: dict[str, Any] = {
            "manifest": MANIFEST,
            "row_bytes": ROW_BYTES,
            "arena": self.arena,
            "honours_busy": False,
        }
        Path(root).mkdir(mode=0o700)
        self.disk = kvstrata.open_tier(
            f"file://{root}", capacity=ROW_BYTES * KEYS // 4, min_free=0, **common
        )
        self.bucket = kvstrata.open_tier(
            url, endpoint=endpoint, allow_http=True, found_s=2, absent_s=1, **common
        )
        self.chance = random.Random(seed)
        self.payloads = {number: payload(key_of(number)) for number in range(KEYS)}
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.own: set[int] = set()
        self.from_peers = 0
        self.wrong = 0
        self.jobs = 0

    def run(self, tier: Any, what: str, numbers: list[int]) -> list[str]:
        self.jobs += 1
        begin = tier.store if what == "store" else tier.load
        begin(self.jobs, [key_of(n) for n in numbers], [n * ROW_BYTES for n in range(len(numbers))])
        (result,) = tier.wait(60.0)
        name = "disk" if tier is self.disk else "bucket"
        self.outcomes.update(f"{name} {what} {outcome}" for outcome in result.outcomes)
        return list(result.outcomes)

    def store(self) -> None:
        numbers = self.chance.sample(range(KEYS), self.chance.randint(1, SLOTS))
        for slot, number in enumerate(numbers):
            self.arena[slot * ROW_BYTES : (slot + 1) * ROW_BYTES] = self.payloads[number]
        outcomes = self.run(self.bucket, "store", numbers)
        pairs = zip(numbers, outcomes, strict=True)
        self.own |= {number for number, outcome in pairs if outcome == "ok"}
        self.run(self.disk, "store", numbers)

    def load(self) -> None:
        wanted = self.chance.sample(range(KEYS), self.chance.randint(1, SLOTS))
        found = self.disk.lookup([key_of(number) for number in wanted])
        local = [number for number, there in zip(wanted, found, strict=True) if there]
        self.check(local, self.run(self.disk, "load", local) if local else [])
        asked = [number for number in wanted if number not in local]
        below = self.bucket.lookup([key_of(number) for number in asked])
        there = [number for number, known in zip(asked, below, strict=True) if known is not False]
        if not there:
            return
        self.arena[:] = b"\xee" * len(self.arena)
        outcomes = self.run(self.bucket, "load", there)
        self.check(there, outcomes)
        pairs = list(zip(there, outcomes, strict=True))
        self.from_peers += sum(o == "ok" and n not in self.own for n, o in pairs)
        # Removed since: whoever stores it next made the one that comes then.
        self.own -= {number for number, outcome in pairs if outcome == "miss"}

    def check(self, numbers: list[int], outcomes: list[str]) -> None:
        for slot, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            there = self.arena[slot * ROW_BYTES : (slot + 1) * ROW_BYTES]
            self.wrong += outcome == "ok" and there != self.payloads[number]

    def work(self) -> dict[str, Any]:
        until = None
        while until is None or (self.from_peers == 0 and time.monotonic() < until):
            self.chance.choice([self.store, self.load])()
            if until is None and select.select([sys.stdin], [], [], 0)[0]:
                until = time.monotonic() + LONGER_SECONDS
        stats = self.bucket.stats()
        self.disk.close()
        self.bucket.close()
        names = ("errors", "corrupt_rows", "circuit_openings", "denied_reads", "retries_refused")
        return {
            "wrong": self.wrong,
            "outcomes": self.outcomes,
            "from_peers": self.from_peers,
            "jobs": self.jobs,
            "bad": {name: stats[name] for name in names if stats[name]},
        }


def main(url: str, endpoint: str, root: str, seed: str) -> None:
    print(json.dumps(Sharer(url, endpoint, root, int(seed)).work()))


if __name__ == "__main__":
    main(*sys.argv[1:])
