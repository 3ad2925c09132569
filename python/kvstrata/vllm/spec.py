"""vLLM's tiering spec with a worker of our own, which runs wherever torch runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import compat, packed

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvstrata.memory.layout import PageRef
    from kvstrata.vllm.worker import KVStrataWorker


class KVStrataSpec(TieringOffloadingSpec):
    """Stock manager, stock shared region, our worker.

    Refused at start, with :class:`kvstrata.ConfigError`: `canonical_layout` (its byte map is not
    certified here) and pipeline parallelism (stages may disagree about the size of a chunk).
    """

    def __init__(self, config: OffloadingConfig) -> None:
        compat.require_version()
        if config.canonical_layout:
            msg = (
                "KVStrataSpec cannot certify canonical_layout: remove it from "
                "kv_connector_extra_config, or set spec_name to TieringOffloadingSpec"
            )
            raise kvstrata.ConfigError(msg)
        if config.parallel.pp_size > 1:
            msg = (
                "KVStrataSpec does not support pipeline parallelism "
                f"({config.parallel.pp_size} stages): use tensor parallelism, or set spec_name to "
                "TieringOffloadingSpec"
            )
            raise kvstrata.ConfigError(msg)
        super().__init__(config)
        if self.num_chunks < 1:
            msg = (
                f"cpu_bytes_to_use={self.extra_config.get('cpu_bytes_to_use')} holds no chunk of "
                f"{self.kv_bytes_per_chunk} bytes"
            )
            raise kvstrata.ConfigError(msg)
        self._kvstrata_worker: KVStrataWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker; the one that is there takes the new tensors (after a sleep, say).

        # Errors
        :class:`kvstrata.ConfigError` where the tensors do not fit the slots, or the self-test
        fails.
        """
        try:
            if self._kvstrata_worker is None:
                self._kvstrata_worker = self._make_worker(kv_caches)
            else:
                self._kvstrata_worker.rebind(kv_caches, self._refs(kv_caches))
        except LayoutError as error:
            raise kvstrata.ConfigError(str(error)) from error
        return self._kvstrata_worker

    def _refs(self, kv_caches: CanonicalKVCaches) -> tuple[tuple[PageRef, ...], ...]:
        pages = self.extra_config.get(packed.KEY)
        return packed.group_refs(kv_caches, pages, self.config.kv_cache_layout)

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> KVStrataWorker:
        from kvstrata.vllm.worker import KVStrataWorker

        rank = 0 if self.replicated_layout else self.config.parallel.rank
        region = compat.open_region(self, rank)
        try:
            compat.pin_region(region)
            return KVStrataWorker(
                kv_caches,
                self._refs(kv_caches),
                region,
                area_offset=rank * self.cpu_page_size_per_worker,
                area_bytes=self.cpu_page_size_per_worker,
                blocks_per_chunk=self.blocks_per_chunk,
                self_test_slot=self.config.parallel.rank % self.num_chunks,
            )
        except Exception:
            region.cleanup()
            raise
