"""A workbench for the tests of `open_tier`: a root, an arena, keys with payloads of their own."""

import gc
import hashlib
import mmap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvstrata

WAIT_S = 30.0


class Workbench:
    """Opens tiers on one root and moves rows through one arena."""

    row_bytes: ClassVar = {0: 8192, 1: 5000}
    stride = 8192
    slots = 64

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arena = mmap.mmap(-1, self.stride * self.slots)
        self._tiers: list[kvstrata.Tier] = []
        self._job = 1_000_000

    def open(self, **changes: Any) -> kvstrata.Tier:
        options: dict[str, Any] = {
            "url": self.root,
            "manifest": {"model": "test/model", "dtype": "bfloat16", "block_size": 16},
            "row_bytes": self.row_bytes,
            "arena": self.arena,
            "capacity": 64 << 20,
            "min_free": 0,
        }
        options |= changes
        tier = kvstrata.open_tier(options.pop("url"), **options)
        self._tiers.append(tier)
        return tier

    def close_all(self) -> None:
        for tier in self._tiers:
            tier.close()

    @staticmethod
    def key(number: int, group: int = 0) -> bytes:
        return hashlib.sha256(b"%d" % number).digest() + group.to_bytes(4, "big")

    def keys(self, numbers: Sequence[int], group: int = 0) -> list[bytes]:
        return [self.key(number, group) for number in numbers]

    def payload(self, key: bytes, version: int = 0) -> bytes:
        length = self.row_bytes[int.from_bytes(key[-4:], "big")]
        return hashlib.shake_128(key + bytes([version])).digest(length)

    def offsets(self, keys: Sequence[bytes]) -> list[int]:
        return [self.stride * position for position in range(len(keys))]

    def fill(self, keys: Sequence[bytes], version: int = 0) -> list[int]:
        offsets = self.offsets(keys)
        for key, offset in zip(keys, offsets, strict=True):
            payload = self.payload(key, version)
            self.arena[offset : offset + len(payload)] = payload
        return offsets

    def slot(self, key: bytes, offset: int) -> bytes:
        return self.arena[offset : offset + self.row_bytes[int.from_bytes(key[-4:], "big")]]

    def wait(self, tier: kvstrata.Tier, job_id: int) -> kvstrata.JobResult:
        """The result of the only job in flight."""
        results = tier.wait(WAIT_S)
        assert [result.job_id for result in results] == [job_id]
        return results[0]

    def job_id(self) -> int:
        self._job += 1
        return self._job

    def store(
        self, tier: kvstrata.Tier, keys: Sequence[bytes], version: int = 0
    ) -> kvstrata.JobResult:
        job_id = self.job_id()
        tier.store(job_id, keys, self.fill(keys, version))
        return self.wait(tier, job_id)

    def load(self, tier: kvstrata.Tier, keys: Sequence[bytes]) -> kvstrata.JobResult:
        """Loads into slots that held something else."""
        offsets = self.offsets(keys)
        for key, offset in zip(keys, offsets, strict=True):
            self.arena[offset : offset + len(self.payload(key))] = b"\xee" * len(self.payload(key))
        job_id = self.job_id()
        tier.load(job_id, keys, offsets)
        return self.wait(tier, job_id)

    def holds(self, keys: Sequence[bytes], version: int = 0) -> bool:
        """Whether the slots hold the payloads of `keys`."""
        pairs = zip(keys, self.offsets(keys), strict=True)
        return all(self.slot(key, offset) == self.payload(key, version) for key, offset in pairs)

    def namespace(self) -> Path:
        [directory] = [path.parent for path in self.root.glob("*/namespace.json")]
        return directory

    def row_files(self) -> list[Path]:
        return sorted(self.namespace().glob("rows/**/*.rows"))

    def find(self, payload: bytes) -> tuple[Path, int]:
        """The row file and the place in it that hold `payload`."""
        for path in self.row_files():
            place = path.read_bytes().find(payload)
            if place >= 0:
                return path, place
        raise AssertionError("no row file holds the payload")

    @staticmethod
    def eventually(condition: Any, within_s: float = 10.0) -> bool:
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv")
    yield bench
    bench.close_all()
    gc.collect()
