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
    """A number of `tier.stats()` under vLLM's name for it. A counter only grows."""

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    documentation: str


METRICS = (
    Metric(
        "faults", "vllm:kvstrata_tier_faults", "counter", "Exceptions the tier's guard held back."
    ),
    Metric(
        "disabled", "vllm:kvstrata_tier_disabled", "gauge", "1 where the tier persists nothing."
    ),
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
            value = values.get(metric.key)
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
