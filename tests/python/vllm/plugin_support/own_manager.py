"""Our manager with an arena, tiers on disk, and a worker that writes what its keys say."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

import kvstrata
from kvstrata._native import CpuTier
from kvstrata.vllm.below import TierBelow
from kvstrata.vllm.manager import KVStrataManager
from kvstrata.vllm.opened import Opened
from plugin_support.steps import END, forget_the_cpu_tier, settle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvstrata.vllm.rowspec import RowSpec

ROWS = {0: 8192, 3: 4096}
TOKENS = 16
MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


def keys_of(numbers: Iterable[int], group: int = 0) -> list[Any]:
    return [make_offload_key(number.to_bytes(32, "big"), group) for number in numbers]


def bytes_of(key: bytes) -> bytes:
    """What a row of this key holds."""
    size = ROWS[int.from_bytes(key[-4:], "big")]
    return hashlib.shake_128(key).digest(size)


class Stack:
    """A manager over an arena of `slots` large rows and one disk tier per root."""

    def __init__(
        self, roots: Sequence[Path] = (), slots: int = 8, *, events: bool = False, **tier: Any
    ) -> None:
        self.arena = bytearray(slots * ROWS[0])
        self.roots = roots
        self.tier_options = tier
        self.released = 0
        self.count = 0
        self.manager = KVStrataManager(dict.fromkeys(ROWS, TOKENS), self._open, events=events)

    def _open(self, byte_map: dict[str, Any]) -> Opened:
        tiers = []
        for number, root in enumerate(self.roots):
            native = kvstrata.open_tier(
                root,
                manifest={"model": "m", **byte_map},
                row_bytes=ROWS,
                arena=self.arena,
                capacity="64MiB",
                min_free=0,
                honours_busy=True,
            )
            tiers.append(TierBelow(f"t{number}", native, **self.tier_options))
        return Opened(CpuTier(len(self.arena), ROWS), tuple(tiers), self._release)

    def _release(self) -> None:
        self.released += 1

    def open(self) -> Stack:
        self.manager.open({})
        return self

    @property
    def cpu(self) -> CpuTier:
        assert self.manager.cpu is not None
        return self.manager.cpu

    def request(self, keys: Sequence[Any] = (), **context: Any) -> ReqContext:
        self.count += 1
        made = ReqContext(req_id=f"r{self.count}", **context)
        self.manager.on_new_request(made)
        place: dict[bytes, int] = {}
        for key in keys:
            place[key[-4:]] = place.get(key[-4:], 0) + TOKENS
            made.set_offload_key_position(key, place[key[-4:]])
        return made

    def write(self, rows: RowSpec) -> None:
        for key, offset in zip(rows.keys, rows.offsets.tolist(), strict=True):
            content = bytes_of(key)
            self.arena[offset : offset + len(content)] = content

    def check(self, rows: RowSpec) -> None:
        for key, offset in zip(rows.keys, rows.offsets.tolist(), strict=True):
            content = bytes_of(key)
            assert self.arena[offset : offset + len(content)] == content, "another row's bytes"

    def store(self, keys: Sequence[Any]) -> Any:
        """What a scheduler and a worker do with rows of one request; what was prepared."""
        context = self.request(keys)
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            self.write(output.store_spec)  # type: ignore[arg-type]
            self.manager.complete_store(set(output.keys_to_store), context)
        self.manager.on_request_finished(context)
        return output

    def load(self, keys: Sequence[Any]) -> list[LookupResult]:
        """Ask for keys until none is on its way; load them where all are hits."""
        context = self.request(keys)
        answers = self.ask(keys, context)
        if set(answers) == {HIT}:
            rows: Any = self.manager.prepare_load(keys, context)
            self.step()
            self.check(rows)
            self.manager.complete_load(set(keys), context)
        self.manager.on_request_finished(context)
        return answers

    def ask(self, keys: Sequence[Any], context: ReqContext) -> list[LookupResult]:
        deadline = time.monotonic() + 20
        while True:
            answers = [self.manager.lookup(key, context) for key in keys]
            if not set(answers) & {PENDING, LookupResult.RETRY}:
                return answers
            self.step()
            assert time.monotonic() < deadline, "never came"
            time.sleep(0.002)

    def step(self) -> None:
        self.manager.on_schedule_end(END)

    def settle(self) -> None:
        settle(self.manager)

    def forget_the_cpu_tier(self) -> None:
        forget_the_cpu_tier(self.manager)

    def in_use(self) -> int:
        return int(self.cpu.stats()["rows_in_use"])
