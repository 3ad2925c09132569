"""Our offloading worker over vLLM's shared region. One per rank."""

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

from kvstrata.memory.device import device_of
from kvstrata.memory.layout import LayoutError, SlotLayout
from kvstrata.memory.placement import place_blocks
from kvstrata.memory.selftest import check_copies
from kvstrata.memory.transfer import BlockTransfers
from kvstrata.vllm import compat

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from kvstrata.memory.device import CopyDevice
    from kvstrata.memory.layout import Layout
    from kvstrata.memory.placement import Placement
    from kvstrata.vllm.canonical import Pages

logger = init_logger(__name__)


class TransferWorker(OffloadingWorker):
    """What a worker of ours does with :class:`BlockTransfers`, whoever says where slots lie."""

    _transfers: BlockTransfers
    _device: CopyDevice | None

    def _between(
        self,
        kv_caches: CanonicalKVCaches,
        layout: Layout,
        memory: torch.Tensor,
        never_across: int | None = None,
    ) -> BlockTransfers:
        """Copies between these tensors and slots that lie in `memory` as `layout` says."""
        blocks = tensors_of(kv_caches)
        device = device_of(blocks, compat.batch_copy()) if self._device is None else self._device
        return BlockTransfers(layout, memory, blocks, device, never_across=never_across)

    @property
    def layout(self) -> Layout:
        """Where the pages of each group lie in a slot."""
        return self._transfers.layout

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where block 0 of each KV tensor lies in memory."""
        return self._transfers.addresses

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


class KVStrataWorker(TransferWorker):
    """Our worker over vLLM's shared region, whose slots have one size.

    vLLM has no way to hear of a copy that failed: it asserts success, and the row would count as
    stored. A job whose counts or ids do not fit is therefore refused with an exception, as vLLM's
    own worker refuses it, before a byte is copied: the only other answer would be a row with wrong
    bytes under a valid key.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        pages: Pages,
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
        self._transfers = self._bind(kv_caches, pages)
        self.refused = 0
        if self_test_slot is not None:
            start = self_test_slot * self._slot_bytes
            try:
                check_copies(self._transfers, region.base_tensor, tensors_of(kv_caches), start)
            except LayoutError:
                self._transfers.close()
                raise

    def _bind(self, kv_caches: CanonicalKVCaches, pages: Pages) -> BlockTransfers:
        if self._region is None:
            msg = "the worker was shut down"
            raise LayoutError(msg)
        layout = SlotLayout(
            slot_bytes=self._slot_bytes,
            area_offset=self._area_offset,
            area_bytes=self._area_bytes,
            blocks_per_chunk=self._blocks_per_chunk,
            tensor_page_bytes=pages.slot_bytes,
            groups=pages.groups,
            block_page_bytes=page_bytes_of(kv_caches),
        )
        return self._between(kv_caches, layout, self._region.base_tensor)

    def rebind(self, kv_caches: CanonicalKVCaches, pages: Pages) -> None:
        """Finish what is in flight and use other KV tensors from now on."""
        fresh = self._bind(kv_caches, pages)
        fresh.succeed(self._transfers)
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
            layout = self._transfers.layout
            if not isinstance(layout, SlotLayout):
                msg = f"slots of one size in {type(layout).__name__}"
                raise LayoutError(msg)  # noqa: TRY301 -- refused like the rest
            placements = place_blocks(
                layout,
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

    def shutdown(self) -> None:
        """Finish what is in flight and unmap the region. Safe to call again."""
        region, self._region = self._region, None
        if region is None:
            return
        try:
            self._transfers.close()
        finally:
            region.cleanup()


def tensors_of(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    """The KV tensors, int8 ``(blocks, page)`` each."""
    return [item.tensor for item in kv_caches.tensors]


def page_bytes_of(kv_caches: CanonicalKVCaches) -> tuple[int, ...]:
    """The bytes of a block's page in each KV tensor."""
    return tuple(int(item.page_size_bytes) for item in kv_caches.tensors)


def _slot_ids(spec: LoadStoreSpec) -> Any:
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        msg = f"slots given as {type(spec).__name__}"
        raise LayoutError(msg)
    return _ids(spec.block_ids)


def _ids(ids: Any) -> Any:
    return np.array(ids, dtype=np.int64)
