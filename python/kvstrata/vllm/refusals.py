"""What workers refused, on its way to the manager beside vLLM's own reports.

vLLM has no word for a copy that failed: a worker acknowledges every job. What it did not copy it
says here, in the same message or an earlier one, so that no such row is ever found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class RowReports(OffloadingWorkerMetadata):
    """VLLM's completed jobs, with the keys of rows that were not copied."""

    refused: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, base: OffloadingWorkerMetadata | None, refused: frozenset[bytes]) -> RowReports:
        """One worker's reports of a step."""
        base = OffloadingWorkerMetadata() if base is None else base
        return cls(base.completed_jobs, base.transfer_stats, refused)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RowReports:
        """The reports of several ranks: a row that one of them refused is refused."""
        merged: Any = super().aggregate(other)
        theirs = other.refused if isinstance(other, RowReports) else frozenset()
        return RowReports.of(merged, self.refused | theirs)
