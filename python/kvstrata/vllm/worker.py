"""Our offloading worker: copies between vLLM's KV tensors and the shared region. One per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvstrata.memory.layout import LayoutError, PageRef, SlotLayout, place_blocks
from kvstrata.memory.selftest import check_copies
from kvstrata.memory.transfer import BlockTransfers

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from kvstrata.memory.device import CopyDevice
    from kvstrata.memory.layout import Placement

logger = init_logger(__name__)


class KVStrataWorker(OffloadingWorker):
    """Implements vLLM's `OffloadingWorker` over :class:`BlockTransfers`.

    vLLM has no way to hear of a copy that failed: it asserts success, and the row would count as
    stored. A job whose counts or ids do not fit is therefore refused with an exception, as vLLM's
    own worker refuses it, before a byte is copied: the only other answer would be a row with wrong
    bytes under a valid key.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        refs: tuple[tuple[PageRef, ...], ...],
        region: SharedOffloadRegion,
        *,
        area_offset: int,
        area_bytes: int,
        blocks_per_chunk: int,
        self_test_slot: int | None,
        device: CopyDevice | None = None,
    ) -> None:
        """Take over `region`: :meth:`shutdown` unmaps it. `self_test_slot` ends up zeroed."""
        self._region: SharedOffloadRegion | None = region
        self._slot_bytes = int(region._row_stride)  # noqa: SLF001 -- vLLM publishes it nowhere else
        self._area_offset = area_offset
        self._area_bytes = area_bytes
        self._blocks_per_chunk = blocks_per_chunk
        self._device = device
        self._transfers = self._bind(kv_caches, refs)
        self.refused = 0
        if self_test_slot is not None:
            blocks = [item.tensor for item in kv_caches.tensors]
            try:
                check_copies(self._transfers, region.base_tensor, blocks, self_test_slot)
            except LayoutError:
                self._transfers.close()
                raise

    def _bind(
        self, kv_caches: CanonicalKVCaches, refs: tuple[tuple[PageRef, ...], ...]
    ) -> BlockTransfers:
        if self._region is None:
            msg = "the worker was shut down"
            raise LayoutError(msg)
        layout = SlotLayout(
            slot_bytes=self._slot_bytes,
            area_offset=self._area_offset,
            area_bytes=self._area_bytes,
            blocks_per_chunk=self._blocks_per_chunk,
            tensor_page_bytes=tuple(int(item.page_size_bytes) for item in kv_caches.tensors),
            groups=refs,
        )
        blocks: list[torch.Tensor] = [item.tensor for item in kv_caches.tensors]
        return BlockTransfers(layout, self._region.base_tensor, blocks, self._device)

    def rebind(self, kv_caches: CanonicalKVCaches, refs: tuple[tuple[PageRef, ...], ...]) -> None:
        """Finish what is in flight and use other KV tensors from now on."""
        fresh = self._bind(kv_caches, refs)
        self._transfers.close()
        self._transfers = fresh

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks to slots. `True`, or :class:`LayoutError` for a job that does not fit."""
        return self._submit("store", job_id, src_spec, dst_spec, self._transfers.store)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: FBT001, FBT002 -- vLLM's signature
    ) -> bool:
        """Copy slots to blocks. `True`, or :class:`LayoutError` for a job that does not fit."""

        def load(number: int, placements: list[Placement]) -> None:
            self._transfers.load(number, placements, expedited=expedited)

        return self._submit("load", job_id, dst_spec, src_spec, load)

    def _submit(
        self,
        what: str,
        job_id: int,
        block_spec: GPULoadStoreSpec,
        slot_spec: LoadStoreSpec,
        submit: Callable[[int, list[Placement]], None],
    ) -> bool:
        try:
            placements = place_blocks(
                self._transfers.layout,
                _ids(block_spec.block_ids),
                [int(size) for size in block_spec.group_sizes],
                [int(index) for index in block_spec.block_indices],
                _slot_ids(slot_spec),
            )
            submit(job_id, placements)
        except Exception as error:
            self.refused += 1
            logger.error(  # noqa: TRY400 -- it is raised on
                "kvstrata: %s job %d is refused: %s", what, job_id, error
            )
            raise
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs whose copies ended since the last call, each of them once."""
        return [
            TransferResult(
                job_id=job.job_id,
                success=True,
                transfer_size=job.size_bytes,
                transfer_time=job.seconds,
            )
            for job in self._transfers.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs' copies are done; ids that are unknown or done are ignored."""
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Finish what is in flight and unmap the region. Safe to call again."""
        region, self._region = self._region, None
        if region is None:
            return
        try:
            self._transfers.close()
        finally:
            region.cleanup()


def _slot_ids(spec: LoadStoreSpec) -> Any:
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        msg = f"slots given as {type(spec).__name__}"
        raise LayoutError(msg)
    return _ids(spec.block_ids)


def _ids(ids: Any) -> Any:
    return np.array(ids, dtype=np.int64)
