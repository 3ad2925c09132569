"""vLLM's tiering spec, with our worker where vLLM's own does not run: nothing else is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstrata.vllm.spec import KVStrataSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


class StockSpec(TieringOffloadingSpec):
    pages = KVStrataSpec.pages
    _make_worker = KVStrataSpec._make_worker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return self._make_worker(kv_caches)
