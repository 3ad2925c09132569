"""What a tier reports to vLLM's metrics: counters and gauges taken from `tier.stats()`.

Every name has to be declared in the API server's process before the engine emits it; an undeclared
one would end vLLM's stat logging. So only names of :data:`METRICS` and :data:`CPU_METRICS` are ever
emitted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

INTERVAL_SECONDS = 5.0
LABELS = ("tier",)


@dataclass(frozen=True)
class Metric:
    """A number of `tier.stats()`, at a dotted key, under vLLM's name. A counter only grows."""

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    documentation: str


def _counter(key: str, documentation: str) -> Metric:
    return Metric(key, _name(key), "counter", documentation)


def _gauge(key: str, documentation: str) -> Metric:
    return Metric(key, _name(key), "gauge", documentation)


def _name(key: str) -> str:
    return "vllm:kvstrata_tier_" + key.replace(".", "_")


METRICS = (
    _gauge("disabled", "1 where the tier persists nothing, else 0."),
    _gauge("degraded", "1 unless the tier's health is ok, else 0."),
    _gauge("rows", "Rows in the tier."),
    _gauge("payload_bytes", "Bytes of KV data in the tier."),
    _gauge("used_bytes", "Bytes the tier's files take on disk."),
    _gauge("capacity_bytes", "Bytes the tier's files may take."),
    _gauge("queued_stores", "Stores that wait to be planned."),
    _gauge("store_bytes_open", "Bytes of stores without a result."),
    _gauge("queued_reads", "Reads that wait in the I/O engine."),
    _gauge("queued_writes", "Writes that wait in the I/O engine."),
    _gauge("in_flight_operations", "Operations that the kernel has."),
    _gauge("stuck_operations", "Operations past their deadline that the kernel still has."),
    *(
        _gauge(f"latency.{hop}.{quantile}_seconds", f"{what}: {word} since the start, in seconds.")
        for hop, what in (
            ("load", "Loads, from the call to the last outcome"),
            ("store", "Stores, from the call to the last outcome"),
            ("read_wait", "Reads, waiting to be started"),
            ("read", "Reads, from their start to their end"),
            ("write_wait", "Writes, waiting to be started"),
            ("write", "Writes, from their start to their end"),
        )
        for quantile, word in (("p50", "median"), ("p99", "99th percentile"))
    ),
    _counter("faults", "Exceptions that the plug-in's guard held back."),
    _counter("errors", "Errors of the tier that were logged, or held back by the log's limit."),
    _counter("bytes_stored", "Bytes of KV data stored."),
    _counter("bytes_loaded", "Bytes of KV data loaded and verified."),
    _counter("bytes_written", "Bytes handed to the device for rows, padding included."),
    _counter("evicted_rows", "Rows that made room for others."),
    _counter("corrupt_rows", "Rows whose bytes were not those stored; answered as misses."),
    _counter("torn_rows", "The same, for rows that a crash cut short."),
    _counter("retired_rows", "Rows set aside after a device error."),
    _counter("circuit_openings", "Times that reads or writes were given up for a while."),
    _counter("circuit_missed_lookups", "Keys answered no because reads were given up."),
    _counter("circuit_missed_loads", "Keys not loaded because reads were given up."),
    _counter("circuit_dropped_stores", "Keys not stored because writes were given up."),
    _counter("lookups", "Keys looked up."),
    _counter("lookup_hits", "Keys looked up that were there."),
    _counter("store_keys", "Keys of stores, whatever came of them."),
    _counter("store_outcomes.ok", "Keys stored."),
    _counter("store_outcomes.present", "Keys not stored because they were there already."),
    _counter("coalesced_loads", "Keys whose load waited for another load's read of the row."),
    _counter("refused_loads", "Keys not loaded because too many reads were stuck."),
    _counter("store_outcomes.no_space", "Keys not stored for want of space."),
    _counter(
        "store_outcomes.dropped", "Keys not stored: overload, reset, removal, or not admitted."
    ),
    _counter("unadmitted_stores", "Keys not stored because their rows are unlikely to be used."),
    _counter("store_outcomes.io_error", "Keys not stored because of a device error."),
    _counter("store_outcomes.timeout", "Keys not stored before the deadline."),
    _counter("load_keys", "Keys of loads, whatever came of them."),
    _counter("load_outcomes.ok", "Keys loaded and verified."),
    _counter("load_outcomes.corrupt", "Keys whose bytes were not those stored."),
    _counter("load_outcomes.miss", "Keys that were gone when their load began."),
    _counter("load_outcomes.io_error", "Keys not loaded because of a device error."),
    _counter("load_outcomes.timeout", "Keys not loaded before the deadline."),
)


# Of the CPU tier whose slots fit their group: keys of `CpuTier.stats()`.
_CPU: tuple[tuple[Literal["counter", "gauge"], str, str], ...] = (
    ("gauge", "capacity_bytes", "Bytes of the arena."),
    ("gauge", "payload_bytes", "Bytes of KV data in slots."),
    ("gauge", "slot_bytes", "Bytes of slots that are taken, padding included."),
    ("gauge", "rows", "Rows that lookups find."),
    ("gauge", "rows_in_use", "Rows that are written, read, or kept for waiting requests."),
    ("gauge", "orphaned_rows", "Rows from before a reset that are still in use."),
    ("counter", "lookups", "Keys looked up."),
    ("counter", "lookup_hits", "Keys looked up that were there or on their way."),
    ("counter", "stored_keys", "Keys given a slot, by workers and by tiers below."),
    ("counter", "loaded_keys", "Keys loaded by workers."),
    ("counter", "refused_stores", "Stores that found no room; vLLM asks again."),
    ("counter", "evicted_rows", "Rows that made room for others."),
    ("counter", "moved_slabs", "Slabs that went to rows of another size."),
    ("counter", "unadmitted_stores", "Keys not stored because they are unlikely to be used."),
    ("counter", "bypassed_stores", "Keys not stored because what would go is worth more."),
    ("gauge", "observed_requests", "Requests whose keys the eviction policy was told of."),
    ("gauge", "awaited_requests", "Requests that do not run yet and for which rows are kept."),
    ("gauge", "awaited_bytes", "Bytes of the slots of these rows."),
    ("counter", "unprotected_requests", "Such requests whose rows had to go for a store."),
    ("counter", "faults", "Exceptions that the manager held back."),
    ("counter", "refused_rows", "Rows whose blocks did not fit them; not stored."),
    ("counter", "skipped_stores", "Jobs not handed to a tier below that was behind."),
    ("counter", "wanted_rows", "Rows queued to be loaded from a tier below, once for all waiters."),
    ("counter", "waits", "Requests that were told to ask again."),
    ("counter", "timed_out_waits", "Requests that waited too long, and went on without."),
    ("counter", "cut_spans", "Requests whose rows together had no room, and got a part of them."),
    ("gauge", "queued_rows", "Rows that wait to be loaded from a tier below."),
    ("gauge", "loading_rows", "Rows that are being loaded from a tier below."),
    ("gauge", "held_rows", "Rows from below that are kept for requests that wait."),
    ("gauge", "waiting_requests", "Requests that wait for rows."),
)
CPU_METRICS = tuple(Metric(key, f"vllm:kvstrata_cpu_{key}", kind, text) for kind, key, text in _CPU)


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """VLLM's declarations of :data:`METRICS`."""
    return _declared(METRICS, LABELS)


def cpu_definitions() -> dict[str, OffloadingMetricMetadata]:
    """VLLM's declarations of :data:`CPU_METRICS`."""
    return _declared(CPU_METRICS, ())


def _declared(
    table: tuple[Metric, ...], labels: tuple[str, ...]
) -> dict[str, OffloadingMetricMetadata]:
    return {
        metric.name: (
            OffloadingCounterMetadata(documentation=metric.documentation, labelnames=labels)
            if metric.kind == "counter"
            else OffloadingGaugeMetadata(documentation=metric.documentation, labelnames=labels)
        )
        for metric in table
    }


class TierMetrics:
    """Turns snapshots into vLLM's deltas, at most one per :data:`INTERVAL_SECONDS`."""

    def __init__(
        self,
        tier_type: str | None,
        clock: Callable[[], float] = time.monotonic,
        table: tuple[Metric, ...] = METRICS,
    ) -> None:
        self._labels = () if tier_type is None else (tier_type,)
        self._table = table
        self._clock = clock
        self._due = clock()
        self._last: dict[str, float] = {}

    def take(self, snapshot: Callable[[], Mapping[str, Any]]) -> OffloadingConnectorStats | None:
        """The changes since the last call, or `None` while it is too early or nothing changed."""
        now = self._clock()
        if now < self._due:
            return None
        self._due = now + INTERVAL_SECONDS
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        values = snapshot()
        stats = OffloadingConnectorStats()
        for metric in self._table:
            value = _pick(values, metric.key)
            if not isinstance(value, (int, float)):
                continue
            if metric.kind == "gauge":
                stats.set_gauge(metric.name, value, self._labels)
                continue
            change = value - self._last.get(metric.key, 0)
            self._last[metric.key] = value
            if change > 0:
                stats.increase_counter(metric.name, change, self._labels)
        return None if stats.is_empty() else stats


def _pick(values: Mapping[str, Any], key: str) -> object:
    """The value under a dotted key, `None` where a part of the way is missing."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
