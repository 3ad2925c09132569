"""What a manager tells of itself and its tiers: metrics for vLLM, and a line about long waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvstrata.vllm import metrics
from kvstrata.vllm.guard import LOG_INTERVAL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    from kvstrata.vllm.below import TierBelow

logger = init_logger(__name__)


class Reports:
    """See the module. `wait_s` is how long a request may wait."""

    def __init__(self, clock: Callable[[], float], wait_s: float) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._metrics = metrics.TierMetrics(None, table=metrics.CPU_METRICS)
        self._off: list[metrics.TierMetrics] = []
        self._told_of_wait = -LOG_INTERVAL_SECONDS

    def name_off(self, names: Iterable[str]) -> None:
        """Tiers that persist nothing."""
        self._off = [metrics.TierMetrics(name) for name in names]

    def take(
        self, snapshot: Callable[[], dict[str, Any]], tiers: Iterable[TierBelow]
    ) -> OffloadingConnectorStats | None:
        """Metrics since the last call; `snapshot` makes those of the CPU tier."""
        taken = [self._metrics.take(snapshot)]
        taken += [tier.get_stats() for tier in tiers]
        taken += [tier.take(lambda: {"disabled": 1, "degraded": 0}) for tier in self._off]
        stats = [one for one in taken if one is not None]
        if not stats:
            return None
        for other in stats[1:]:
            stats[0].aggregate(other)
        return stats[0]

    def tell_of_wait(self, key: bytes) -> None:
        """Log, once in a while, that a request waited too long for a row among others."""
        now = self._clock()
        if now - self._told_of_wait < LOG_INTERVAL_SECONDS:
            return
        self._told_of_wait = now
        logger.warning(
            "kvstrata: a request waited %g s for rows, among them %s; it goes on without what "
            "is not there (vllm:kvstrata_cpu_timed_out_waits counts such requests)",
            self._wait_s,
            key.hex(),
        )
