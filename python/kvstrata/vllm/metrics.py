"""What a tier reports to vLLM's metrics: counters and gauges taken from `tier.stats()`.

Every name has to be declared in the API server's process before the engine emits it; an undeclared
one would end vLLM's stat logging. So only names of :data:`METRICS` are ever emitted.
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
    _gauge("rows", "Rows in the tier."),
    _gauge("payload_bytes", "Bytes of KV data in the tier."),
    _gauge("used_bytes", "Bytes the tier's files take on disk."),
    _gauge("capacity_bytes", "Bytes the tier's files may take."),
    _counter("faults", "Exceptions that the plug-in's guard held back."),
    _counter("errors", "Errors of the tier that were logged, or held back by the log's limit."),
    _counter("bytes_stored", "Bytes of KV data stored."),
    _counter("bytes_loaded", "Bytes of KV data loaded and verified."),
    _counter("bytes_written", "Bytes handed to the device for rows, padding included."),
    _counter("evicted_rows", "Rows that made room for others."),
    _counter("corrupt_rows", "Rows whose bytes were not those stored; answered as misses."),
    _counter("torn_rows", "The same, for rows that a crash cut short."),
    _counter("store_outcomes.no_space", "Keys not stored for want of space."),
    _counter("store_outcomes.dropped", "Keys not stored because too much was queued, or reset."),
    _counter("store_outcomes.io_error", "Keys not stored because of a device error."),
    _counter("load_outcomes.miss", "Keys that were gone when their load began."),
    _counter("load_outcomes.io_error", "Keys not loaded because of a device error."),
    _counter("load_outcomes.timeout", "Keys not loaded before the deadline."),
)


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """VLLM's declarations of :data:`METRICS`."""
    return {
        metric.name: (
            OffloadingCounterMetadata(documentation=metric.documentation, labelnames=LABELS)
            if metric.kind == "counter"
            else OffloadingGaugeMetadata(documentation=metric.documentation, labelnames=LABELS)
        )
        for metric in METRICS
    }


class TierMetrics:
    """Turns snapshots into vLLM's deltas, at most one per :data:`INTERVAL_SECONDS`."""

    def __init__(self, tier_type: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._labels = (tier_type,)
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
        for metric in METRICS:
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
