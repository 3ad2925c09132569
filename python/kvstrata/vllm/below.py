"""A tier of ours below the CPU tier: its jobs, the slots they use, and what becomes of them.

It never blocks and never raises: what it cannot do is a miss or a row that is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstrata
from kvstrata.vllm import metrics
from kvstrata.vllm.guard import Faults, guarded
from kvstrata.vllm.residency import Residency

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import Locality, OffloadingEvent

logger = init_logger(__name__)

_GOOD = frozenset({"ok", "present"})
_CLOSE_SECONDS = 10.0
# Keys of rows that the tier did not take, and that are offered again when a request has them.
_DROPPED_MAX = 1 << 16


@dataclass(frozen=True)
class Slots:
    """Rows of a job: keys, where their slots begin, and the CPU tier's handles of these uses."""

    keys: tuple[bytes, ...]
    offsets: tuple[int, ...]
    handles: tuple[int, ...]
    # Payload of all rows.
    size: int


@dataclass(frozen=True)
class Ended:
    """A job that ended.

    `lost` are the positions of rows that were not moved, `busy` those whose slots the kernel still
    has: a handle in :meth:`TierBelow.no_longer_busy` says when it has not.
    """

    is_load: bool
    slots: Slots
    lost: tuple[int, ...]
    busy: tuple[int, ...]


@dataclass
class TierBelow:
    """Drives a native tier whose caller keeps slots that the kernel still has (`honours_busy`)."""

    name: str
    native: Any
    locality: Locality | None = None
    wants_events: bool = False
    # Bytes of rows that wait to be stored; further rows are not handed on while there are more.
    store_bytes_max: int = 1 << 62
    # Whether a request's rows are handed on that were in the CPU tier before it came, too.
    is_request_level: bool = False

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.DISK

    def __post_init__(self) -> None:
        self.faults = Faults(f"kvstrata tier {self.name!r}")
        self._metrics = metrics.TierMetrics(self.name)
        self._jobs: dict[int, tuple[bool, Slots]] = {}
        self._refused: list[Ended] = []
        self._busy: dict[int, int] = {}
        self._next_job = 0
        self._store_bytes = 0
        self._residency = Residency(self.medium, self.locality, self.name, wanted=self.wants_events)
        self.skipped_stores = 0
        self._dropped: dict[bytes, None] = {}
        # Jobs that store a row in this epoch.
        self._storing: dict[bytes, int] = {}

    @guarded(lambda: None)
    def observe(self, name: str, keys: list[Any], known: dict[str, Any]) -> None:
        """A request has arrived with these keys: its one access to them."""
        self.native.observe(name, keys, **known)

    @guarded(lambda: None)
    def finish(self, name: str, output_tokens: int | None) -> None:
        """It has ended."""
        self.native.finish(name, output_tokens)

    def offered_again(self, keys: list[Any]) -> list[Any]:
        """Those of a request's keys whose rows the tier did not take when they were offered."""
        return [key for key in keys if key in self._dropped] if self._dropped else []

    def wanted(self, keys: list[bytes]) -> list[bytes]:
        """Those of the keys whose rows it is to be given now.

        None when it is too far behind, and none that a job is storing.
        """
        if self._store_bytes >= self.store_bytes_max:
            self.skipped_stores += 1
            return []
        return [key for key in keys if key not in self._storing] if self._storing else keys

    def store(self, slots: Slots) -> None:
        """Start to store rows."""
        if self._dropped:
            for key in slots.keys:
                self._dropped.pop(key, None)
        self._submit(slots, is_load=False)

    def load(self, slots: Slots) -> None:
        """Start to load rows."""
        self._submit(slots, is_load=True)

    def _submit(self, slots: Slots, *, is_load: bool) -> None:
        job_id, self._next_job = self._next_job, self._next_job + 1
        submit = self.native.load if is_load else self.native.store
        try:
            submit(job_id, slots.keys, slots.offsets)
        except Exception as error:  # noqa: BLE001 -- the engine goes on without these rows
            self.faults.record("load" if is_load else "store", error)
            self._refused.append(Ended(is_load, slots, tuple(range(len(slots.keys))), ()))
            return
        self._jobs[job_id] = (is_load, slots)
        if not is_load:
            self._store_bytes += slots.size
            self._storing |= dict.fromkeys(slots.keys, job_id)

    def poll(self) -> list[Ended]:
        """Jobs that ended since the last call."""
        ended, self._refused = self._refused, []
        if not self._jobs:
            return ended
        try:
            results = self.native.poll()
        except Exception as error:  # noqa: BLE001 -- what was refused must still get out
            self.faults.record("poll", error)
            return ended
        return ended + [one for one in map(self._ended, results) if one is not None]

    def _ended(self, result: Any) -> Ended | None:
        job = self._jobs.pop(int(result.job_id), None)
        if job is None:
            return None
        is_load, slots = job
        outcomes: list[str] = result.outcomes
        if not is_load:
            self._store_bytes -= slots.size
            self._note_stored(int(result.job_id), slots.keys, outcomes)
        self._residency.note_job(zip(slots.keys, outcomes, strict=True), is_load=is_load)
        if result.success and not result.busy:
            return Ended(is_load, slots, (), ())
        for position in result.busy:
            self._busy[slots.handles[position]] = slots.offsets[position]
        lost = tuple(at for at, outcome in enumerate(outcomes) if outcome not in _GOOD)
        return Ended(is_load, slots, lost, tuple(map(int, result.busy)))

    def _note_stored(self, job_id: int, keys: tuple[bytes, ...], outcomes: list[str]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            # After a reset another job may store it, and how this one ended says nothing any more.
            if self._storing.get(key) != job_id:
                continue
            del self._storing[key]
            if outcome == "dropped":
                if len(self._dropped) >= _DROPPED_MAX:
                    del self._dropped[next(iter(self._dropped))]
                self._dropped[key] = None

    @guarded(list)
    def no_longer_busy(self) -> list[int]:
        """Handles of slots that ended jobs named busy and the kernel has given back."""
        if not self._busy:
            return []
        still = set(self.native.busy_offsets())
        freed = [handle for handle, offset in self._busy.items() if offset not in still]
        for handle in freed:
            del self._busy[handle]
        return freed

    def take_events(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        return self._residency.take()

    @property
    def is_pending(self) -> bool:
        """Whether a job is under way, or its end is still to be taken up.

        Slots that the kernel kept beyond their job's end are not: nobody waits for them, and an
        engine without requests would look for them step after step while a mount hangs.
        """
        return bool(self._jobs or self._refused)

    @guarded(lambda: False)
    def reset(self) -> bool:
        """Hide every row for good. `False`: not recorded, and nothing is served until it is."""
        self._dropped.clear()
        self._storing.clear()
        return bool(self.native.reset())

    @guarded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call."""
        return self._metrics.take(self._snapshot)

    def _snapshot(self) -> dict[str, Any]:
        native = dict(self.native.stats())
        return {
            **native,
            "faults": self.faults.total,
            "disabled": 0,
            "degraded": int(native.get("health", "ok") != "ok"),
        }

    def close(self) -> bool:
        """Close the native tier. `False` while the kernel still owns bytes of the arena."""
        try:
            self.native.close(timeout_s=_CLOSE_SECONDS)
        except kvstrata.BusyError as error:
            logger.warning("kvstrata: tier %r: %s", self.name, error)
            return False
        except Exception as error:  # noqa: BLE001
            self.faults.record("close", error)
        return True
