"""The demo's own tiers: the product's, and once, on demand, a wrong row behind its back.

Loaded only inside the warm engine of `kvstrata demo`. While the trigger file is absent each is
the product's tier. When the file is there and a load has ended well (every checksum verified),
one row in the CPU tier is overwritten by another row of the same group before vLLM hears of the
load. Nothing after the checksum can notice, so the answer must change; if it does not, the
demo's comparison could not have seen a wrong byte, and the demo fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.cli.demo.replacer import RowReplacer
from kvstrata.vllm.tiers import KVStrataDiskTier, KVStrataObjectTier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob


class RowReplacingDiskTier(KVStrataDiskTier):
    """`kvstrata_disk` with a `RowReplacer` between the end of a load and vLLM."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        trigger: str,
        **options: Any,
    ) -> None:
        """The product's arguments, and the path of the trigger file."""
        super().__init__(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            **options,
        )
        self._replacer = RowReplacer(primary_kv_view, Path(trigger))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start a load and remember its slots."""
        slots = dict(
            zip(map(bytes, job_metadata.keys), map(int, job_metadata.chunk_ids), strict=True)
        )
        self._replacer.started(job_metadata.job_id, slots)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """The product's results; the replacer sees each before vLLM does."""
        results: list[JobResult] = super().get_finished_jobs()
        for result in results:
            self._replacer.finished(result.job_id, success=result.success)
        return results

    def shutdown(self) -> None:
        """Release the view, then close the product's tier."""
        self._replacer.forget()
        super().shutdown()


class RowReplacingObjectTier(RowReplacingDiskTier, KVStrataObjectTier):
    """The same of `kvstrata_object`."""
