"""Our offloading worker over our own arena: rows lie where the manager says. One per rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.memory.largepages import LargePages, taken
from kvstrata.memory.layout import ExactLayout, LayoutError
from kvstrata.memory.pinning import SMALLEST_PIECE, Pinning, loaded_runtime
from kvstrata.memory.selftest import check_copies
from kvstrata.vllm import fit
from kvstrata.vllm.guard import Faults
from kvstrata.vllm.rowspec import RowSpec
from kvstrata.vllm.worker import TransferWorker, page_bytes_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec

    from kvstrata.memory.arena import Arena
    from kvstrata.memory.device import CopyDevice
    from kvstrata.memory.layout import PageRef
    from kvstrata.memory.placement import Placement
    from kvstrata.memory.transfer import BlockTransfers

    Groups = tuple[tuple[PageRef, ...], ...]

_FIRST_PIECE_SECONDS = 30.0


class KVStrataRowWorker(TransferWorker):
    """Implements vLLM's `OffloadingWorker` for jobs that carry a :class:`RowSpec`.

    Rows whose blocks do not fit (:mod:`kvstrata.vllm.fit`) are not copied: their keys are in
    :meth:`take_refused`, and a load with one of them copies nothing at all and is in
    :meth:`take_failed_loads`. Every job ends in one result, a success in vLLM's words.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        groups: Groups,
        arena: Arena,
        *,
        blocks_per_chunk: int,
        rank: int = 0,
        ranks: int = 1,
        self_test_at: int | None = None,
        takes_pages: bool = False,
        large_pages: bool = True,
        spare_heads: Sequence[int] | None = None,
        device: CopyDevice | None = None,
    ) -> None:
        """Take over `arena`: :meth:`shutdown` closes it.

        `rank` and `ranks` say which part of a row is this worker's; 0 and 1 where all ranks keep
        one copy. `self_test_at` is the first byte of a place for the largest row that no other rank
        uses now. With `takes_pages` this worker makes the arena resident, in the background, and in
        large pages if `large_pages`; on accelerators every worker registers it. `spare_heads` says
        of each group how many blocks at the head of a chunk no load asks for; a row that lacks more
        of them is refused. `None` where any number may be missing.

        # Errors
        :class:`LayoutError` where tensors and groups do not fit, or the self-test fails.
        """
        self._arena: Arena | None = arena
        self._blocks_per_chunk = blocks_per_chunk
        self._rank, self._ranks = rank, ranks
        self._device = device
        self._spare_heads = spare_heads
        self._refused: set[bytes] = set()
        self._failed_loads: set[int] = set()
        self._rows_changed = False
        self.faults = Faults("kvstrata worker")
        self._transfers = self._bind(kv_caches, groups)
        self._pinning = _pinning(arena, kv_caches, takes_pages=takes_pages, large_pages=large_pages)
        if self_test_at is not None:
            tensor = arena.tensor.view(torch.int8)
            try:
                check_copies(self._transfers, tensor, tensors_of(kv_caches), self_test_at)
            except LayoutError:
                self._transfers.close()
                self._unpin()
                raise

    def _bind(self, kv_caches: CanonicalKVCaches, groups: Groups) -> BlockTransfers:
        if self._arena is None:
            msg = "the worker was shut down"
            raise LayoutError(msg)
        layout = ExactLayout(
            blocks_per_chunk=self._blocks_per_chunk,
            groups=groups,
            block_page_bytes=page_bytes_of(kv_caches),
            rank=self._rank,
            ranks=self._ranks,
        )
        memory = self._arena.tensor.view(torch.int8)
        return self._between(kv_caches, layout, memory, never_across=SMALLEST_PIECE)

    def rebind(self, kv_caches: CanonicalKVCaches, groups: Groups) -> None:
        """Finish what is in flight and use other KV tensors from now on.

        Where rows would be others, nothing is copied any more: slots have the size of the old ones.
        """
        fresh = self._bind(kv_caches, groups)
        self._rows_changed |= fresh.layout.rows != self._transfers.layout.rows
        fresh.succeed(self._transfers)
        self._transfers = fresh

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy the rows that fit; the others are refused, and the job ends all the same."""
        try:
            rows = _rows(dst_spec)
        except LayoutError as error:
            self.faults.record("submit_store", error)
            raise
        try:
            self._require_rows_as_agreed()
            found = fit.store(self._transfers, src_spec, rows, self._spare_heads)
            for reason in found.reasons:
                self.faults.record("submit_store", LayoutError(reason))
            self._refused.update(found.refused)
            self._transfers.store(job_id, found.placements)
        except Exception as error:  # noqa: BLE001 -- the engine goes on; no row of the job is found
            self.faults.record("submit_store", error)
            self._refused.update(rows.keys)
            self._transfers.store(job_id, [])
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: FBT001, FBT002 -- vLLM's signature
    ) -> bool:
        """Copy all rows, or none where one does not fit.

        # Errors
        :class:`LayoutError` for an expedited load that does not fit: its request runs in this very
        step, and nothing could keep it from the blocks.
        """
        placements: list[Placement] = []
        try:
            self._require_rows_as_agreed()
            placements = fit.load(self._transfers, dst_spec, _rows(src_spec))
            self._transfers.load(job_id, placements, expedited=expedited)
        except Exception as error:
            self.faults.record("submit_load", error)
            if expedited:
                raise
            self._failed_loads.add(job_id)
            if isinstance(src_spec, RowSpec):
                self._refused.update(src_spec.keys)
            self._transfers.load(job_id, [])
        return True

    def _require_rows_as_agreed(self) -> None:
        if self._rows_changed:
            msg = "the KV tensors' layout changed while the server ran"
            raise LayoutError(msg)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the arena that are registered with the device."""
        return 0 if self._pinning is None else self._pinning.pinned_bytes

    def _unpin(self) -> None:
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.close()

    def take_refused(self) -> frozenset[bytes]:
        """Keys of rows that were not copied, since the last call."""
        refused, self._refused = frozenset(self._refused), set()
        return refused

    def take_failed_loads(self) -> frozenset[int]:
        """Jobs whose blocks hold nothing of what they should, since the last call."""
        failed, self._failed_loads = frozenset(self._failed_loads), set()
        return failed

    def shutdown(self) -> None:
        """Finish what is in flight and let the arena go. Safe to call again."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        try:
            self._transfers.close()
        finally:
            self._unpin()
            arena.close()


def _pinning(
    arena: Arena, kv_caches: CanonicalKVCaches, *, takes_pages: bool, large_pages: bool
) -> Pinning | None:
    """Start taking and registering memory; on accelerators the first piece is waited for."""
    on_host = all(item.tensor.device.type == "cpu" for item in kv_caches.tensors)
    registrar = None if on_host else loaded_runtime()
    if registrar is None and not takes_pages:
        return None
    address = arena.tensor.data_ptr()
    pages = LargePages(arena.fd, address, arena.nbytes, wanted=large_pages)
    pinning = Pinning(
        address,
        arena.nbytes,
        registrar,
        take=pages.take if takes_pages else None,
        is_taken=partial(taken, arena.fd) if large_pages and not takes_pages else None,
    )
    if registrar is not None:
        pinning.wait_first(_FIRST_PIECE_SECONDS)
    return pinning


def _rows(spec: Any) -> RowSpec:
    if not isinstance(spec, RowSpec):
        msg = f"rows given as {type(spec).__name__}"
        raise LayoutError(msg)
    return spec
