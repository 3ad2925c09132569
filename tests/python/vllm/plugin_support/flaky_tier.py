"""A native tier behind faults: late, failing and hanging jobs, slots that stay busy, errors."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

GARBAGE = 0xDD


@dataclass
class Ended:
    """A native job's result as far as it is read, with other outcomes."""

    job_id: int
    kind: str
    outcomes: list[str]
    busy: list[int]
    bytes: int
    seconds: float
    error: str | None

    @property
    def success(self) -> bool:
        return set(self.outcomes) <= {"ok", "present"}


class FlakyTier:
    """Passes everything on to `native`, but for what is planted.

    It also keeps who uses which bytes of the arena, and that no row is stored twice at a time.
    """

    def __init__(self, native: Any, row_bytes: dict[int, int], arena: Any) -> None:
        self.native = native
        self.row_bytes = row_bytes
        self.arena = np.frombuffer(arena, dtype=np.uint8)
        self.chance = random.Random(0)
        # How likely: a row of a load fails, a call raises, a result waits, a failed row is busy.
        self.failing = 0.0
        self.raising = 0.0
        self.late = 0.0
        self.lingering = 0.0
        self.hanging = False
        self.reset_fails = False
        self.planted = 0
        self.epoch = 0
        self.seen: Counter[str] = Counter()
        # Jobs that the manager thinks are under way: kind, epoch, keys, offsets.
        self.open: dict[int, tuple[str, int, tuple[bytes, ...], tuple[int, ...]]] = {}
        self.busy: dict[int, int] = {}
        self._results: list[Any] = []
        # Hears of the slots that a load is to be given.
        self.claim: Callable[[tuple[bytes, ...], tuple[int, ...]], None] = lambda *_: None
        # Rows that loads brought, and in which epoch their load began.
        self.promoted: dict[bytes, int] = {}

    def size_of(self, key: bytes) -> int:
        return self.row_bytes[int.from_bytes(key[-4:], "big")]

    def _may_raise(self, name: str) -> None:
        if self.chance.random() < self.raising:
            self.planted += 1
            self.seen[f"raised in {name}"] += 1
            raise RuntimeError(f"planted in {name}")

    def lookup(self, keys: Any) -> list[bool | None]:
        self._may_raise("lookup")
        found: list[bool | None] = self.native.lookup(keys)
        return found

    def store(self, job_id: int, keys: Any, offsets: Any) -> None:
        self._may_raise("store")
        for kind, epoch, others, _ in self.open.values():
            if kind == "store" and epoch == self.epoch:
                twice = set(others).intersection(keys)
                assert not twice, f"{len(twice)} rows are stored to one tier twice at a time"
        self.open[job_id] = ("store", self.epoch, tuple(keys), tuple(offsets))
        self.seen["stores"] += 1
        self.native.store(job_id, keys, offsets)

    def load(self, job_id: int, keys: Any, offsets: Any) -> None:
        self.claim(tuple(keys), tuple(offsets))
        self._may_raise("load")
        self.open[job_id] = ("load", self.epoch, tuple(keys), tuple(offsets))
        self.seen["loads"] += 1
        self.native.load(job_id, keys, offsets)

    def poll(self) -> list[Ended]:
        self._may_raise("poll")
        self._results += self.native.poll()
        if self.hanging:
            return []
        taken, kept = [], []
        for result in self._results:
            (kept if self.chance.random() < self.late else taken).append(result)
        self._results = kept
        return [self._report(result) for result in taken]

    def _report(self, result: Any) -> Ended:
        kind, epoch, keys, offsets = self.open.pop(result.job_id)
        outcomes, busy = list(result.outcomes), list(result.busy)
        if kind == "load":
            for at, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
                # The first one does, so that however few rows are loaded, one fails.
                is_first = self.failing > 0 and self.seen["rows failed"] == 0
                if outcomes[at] == "ok" and (is_first or self.chance.random() < self.failing):
                    outcomes[at] = "corrupt"
                    self.seen["rows failed"] += 1
                    self._spoil(key, offset)
                    if self.chance.random() < 0.5:
                        self.native.remove([key])
                    if self.chance.random() < self.lingering and at not in busy:
                        busy.append(at)
                        self.busy[offset] = self.size_of(key)
                        self.seen["busy slots"] += 1
            self.promoted |= {
                key: epoch for key, end in zip(keys, outcomes, strict=True) if end == "ok"
            }
        return Ended(
            result.job_id, kind, outcomes, busy, result.bytes, result.seconds, result.error
        )

    def _spoil(self, key: bytes, offset: int) -> None:
        self.arena[offset : offset + self.size_of(key)] = GARBAGE

    def linger(self) -> None:
        """The kernel goes on writing to slots it still has, and gives some of them back."""
        for offset, size in list(self.busy.items()):
            self.arena[offset : offset + size] = GARBAGE
            if self.chance.random() >= self.lingering:
                del self.busy[offset]

    def busy_offsets(self) -> list[int]:
        return [*self.native.busy_offsets(), *self.busy]

    def used(self) -> list[tuple[tuple[int, int], str]]:
        """First byte and end of all that is in use here, and for what."""
        found = [
            ((offset, offset + self.size_of(key)), kind)
            for kind, _, keys, offsets in self.open.values()
            for key, offset in zip(keys, offsets, strict=True)
        ]
        return found + [((offset, offset + size), "busy") for offset, size in self.busy.items()]

    def reset(self) -> bool:
        self.epoch += 1
        done = bool(self.native.reset())
        if self.reset_fails:
            self.seen["resets failed"] += 1
            return False
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        self.busy.clear()
        del self.arena
        self.native.close(timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)
