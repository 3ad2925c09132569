"""A stand-in for `kvstrata.open_tier` with the same calls, rows in memory, and faults on demand.

Only for tests that need a fault the real tier cannot be asked for, and for machines where it is not
built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import kvstrata

ROOTS: dict[str, dict[bytes, bytes]] = {}


@dataclass
class Result:
    job_id: int
    kind: str
    success: bool
    outcomes: list[str]
    busy: list[int] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.001
    error: str | None = None


class StandInTier:
    def __init__(self, url: str, manifest: dict[str, Any], row_bytes: Any, arena: Any) -> None:
        self.manifest = manifest
        self.row_bytes = row_bytes
        self.arena = memoryview(arena)
        assert self.arena.format == "B"
        assert not self.arena.readonly
        self.rows = ROOTS.setdefault(f"{url} {json.dumps(manifest, sort_keys=True)}", {})
        self.results: list[Result] = []
        self.hidden: set[bytes] = set()
        self.calls: list[tuple[str, Any]] = []
        self.load_outcomes: dict[bytes, str] = {}
        self.raising: set[str] = set()
        self.holding = False
        self.closed = False

    def _enter(self, name: str, what: Any = None) -> None:
        self.calls.append((name, what))
        if self.closed:
            raise kvstrata.ClosedError("closed")
        if name in self.raising:
            raise RuntimeError(f"planted fault in {name}")

    def lookup(self, keys: list[bytes]) -> list[bool | None]:
        self._enter("lookup", keys)
        return [key in self.rows and key not in self.hidden for key in keys]

    def store(self, job_id: int, keys: list[bytes], offsets: list[int]) -> None:
        self._enter("store", keys)
        outcomes = []
        for key, offset in zip(keys, offsets, strict=True):
            size = self.row_bytes[int.from_bytes(key[-4:], "big")]
            present = key in self.rows and key not in self.hidden
            outcomes.append("present" if present else "ok")
            self.rows[key] = bytes(self.arena[offset : offset + size])
            self.hidden.discard(key)
        self.results.append(Result(job_id, "store", True, outcomes))

    def load(self, job_id: int, keys: list[bytes], offsets: list[int]) -> None:
        self._enter("load", keys)
        outcomes = []
        for key, offset in zip(keys, offsets, strict=True):
            outcome = self.load_outcomes.get(key, "ok" if key in self.rows else "miss")
            if outcome == "ok":
                row = self.rows[key]
                self.arena[offset : offset + len(row)] = row
            else:
                self.hidden.add(key)
            outcomes.append(outcome)
        self.results.append(Result(job_id, "load", set(outcomes) <= {"ok"}, outcomes))

    def poll(self) -> list[Result]:
        self._enter("poll")
        if self.holding:
            return []
        results, self.results = self.results, []
        return results

    def wait(self, timeout_s: float) -> list[Result]:
        self._enter("wait", timeout_s)
        self.holding = False
        return self.poll()

    def drain(self) -> None:
        self._enter("drain")
        self.holding = False

    def touch(self, keys: list[bytes]) -> None:
        self._enter("touch", keys)

    def stats(self) -> dict[str, Any]:
        self._enter("stats")
        return {}

    def close(self, timeout_s: float = 10.0) -> None:
        self.calls.append(("close", timeout_s))
        if "close" in self.raising:
            raise kvstrata.BusyError("the kernel still owns a slot")
        self.closed = True
        self.arena.release()


class Opener:
    """Stands in for `kvstrata.open_tier`, and keeps what it opened."""

    def __init__(self) -> None:
        self.opened: list[StandInTier] = []
        self.options: list[dict[str, Any]] = []

    def __call__(
        self, url: str, *, manifest: Any, row_bytes: Any, arena: Any, **options: Any
    ) -> StandInTier:
        self.options.append({"url": url, **options})
        tier = StandInTier(url, manifest, row_bytes, arena)
        self.opened.append(tier)
        return tier
