"""vLLM's tiering spec with a worker of our own, which runs wherever torch runs.

Under :class:`kvstrata.vllm.connector.KVStrataConnector` slots fit their group, unless the
configuration says otherwise, and the manager is ours (:mod:`kvstrata.vllm.exact`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstrata
from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import awaited, canonical, compat, configinfo, exact, packed, stackconfig
from kvstrata.vllm.canonical import Pages

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvstrata.vllm.manager import KVStrataManager
    from kvstrata.vllm.rowworker import KVStrataRowWorker
    from kvstrata.vllm.worker import KVStrataWorker


class KVStrataSpec(TieringOffloadingSpec):
    """Slots that fit their group, our manager and arena; or stock manager and shared region.

    The worker is ours both ways. The second way is `slots: uniform`, and all that another connector
    than ours can have: nobody knows there what a group needs.

    Refused at start, with :class:`kvstrata.ConfigError`: `canonical_layout` where a layer's pages
    are not certified for any number of ranks, pipeline parallelism (stages may disagree about the
    size of a chunk) and context parallelism (nobody has certified what its restored blocks hold).

    Under :class:`kvstrata.vllm.connector.KVStrataConnector` every secondary tier is made only when
    the workers have said how their bytes lie (:mod:`kvstrata.vllm.awaited`).
    """

    def __init__(self, config: OffloadingConfig) -> None:
        compat.require_version()
        if config.parallel.pp_size > 1:
            msg = (
                "KVStrataSpec does not support pipeline parallelism "
                f"({config.parallel.pp_size} stages): use tensor parallelism, or set spec_name to "
                "TieringOffloadingSpec"
            )
            raise kvstrata.ConfigError(msg)
        if config.parallel.pcp_size > 1 or config.parallel.dcp_size > 1:
            msg = (
                "KVStrataSpec does not support context parallelism "
                f"(prefill {config.parallel.pcp_size}, decode {config.parallel.dcp_size}): its "
                "restored blocks are not certified; use tensor parallelism, or set spec_name to "
                "TieringOffloadingSpec"
            )
            raise kvstrata.ConfigError(msg)
        self.secondary_tier_configs: list[dict[str, Any]] = []
        super().__init__(config)
        self._kvstrata_worker: KVStrataWorker | None = None
        self._row_worker: KVStrataRowWorker | None = None
        self._row_manager: KVStrataManager | None = None
        mode = self.extra_config.get(exact.KEY)
        self.stack = stackconfig.parse(self.extra_config) if mode == stackconfig.EXACT else None
        if mode is None and len(config.groups) > 1:
            compat.log_once(
                30,
                "kvstrata: under this connector every slot has the size of the largest KV cache "
                "group; use kv_connector=KVStrataConnector for slots that fit their group",
            )
        if self.stack is None:
            self._check_uniform(config)

    def _check_uniform(self, config: OffloadingConfig) -> None:
        if self.num_chunks < 1:
            msg = (
                f"cpu_bytes_to_use={self.extra_config.get('cpu_bytes_to_use')} holds no chunk of "
                f"{self.kv_bytes_per_chunk} bytes"
            )
            raise kvstrata.ConfigError(msg)
        if config.canonical_layout and self.num_chunks < config.parallel.world_size:
            msg = (
                f"cpu_bytes_to_use={self.extra_config.get('cpu_bytes_to_use')} holds "
                f"{self.num_chunks} chunks; canonical_layout needs one for each of "
                f"{config.parallel.world_size} ranks"
            )
            raise kvstrata.ConfigError(msg)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Declare what either way reports. Runs in the API server's process."""
        return {**super().build_metric_definitions(extra_config), **exact.metric_definitions()}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of labels that the manager fills. vLLM 0.33 asks in the API server's process."""
        if extra_config.get(exact.KEY) == stackconfig.EXACT:
            return configinfo.KEYS
        vllms: Any = super()
        return tuple(vllms.config_info_keys(extra_config))

    def get_manager(self) -> OffloadingManager:
        """Our manager, which waits until a connector opens it; or vLLM's, whose tiers wait."""
        if self.stack is not None:
            if self._row_manager is None:
                self._row_manager = exact.make_manager(self)
            return self._row_manager
        if self._manager is not None or not self.extra_config.get(awaited.KEY):
            return super().get_manager()
        entries: list[dict[str, Any]] = self.secondary_tier_configs
        self.secondary_tier_configs = [awaited.entry_for(entry) for entry in entries]
        try:
            return super().get_manager()
        finally:
            self.secondary_tier_configs = entries

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker; the one that is there takes the new tensors.

        # Errors
        :class:`kvstrata.ConfigError` where the tensors do not fit the slots, or the self-test
        fails.
        """
        try:
            if self.stack is not None:
                return self._get_row_worker(kv_caches)
            if self._kvstrata_worker is None:
                self._kvstrata_worker = self._make_worker(kv_caches)
            else:
                self._kvstrata_worker.rebind(kv_caches, self.pages(kv_caches))
        except LayoutError as error:
            raise kvstrata.ConfigError(str(error)) from error
        return self._kvstrata_worker

    def _get_row_worker(self, kv_caches: CanonicalKVCaches) -> KVStrataRowWorker:
        if self._row_worker is None:
            assert self.stack is not None  # noqa: S101 -- the caller has looked
            self._row_worker = exact.make_worker(self, kv_caches, self.stack)
        else:
            self._row_worker.rebind(kv_caches, self.pages(kv_caches).groups)
        return self._row_worker

    def pages(self, kv_caches: CanonicalKVCaches) -> Pages:
        """What a worker copies of each group, and the pages of a slot of one size."""
        if self.config.canonical_layout:
            return canonical.pages(kv_caches)
        pages = self.extra_config.get(packed.KEY)
        refs = packed.group_refs(kv_caches, pages, self.config.kv_cache_layout)
        return Pages(refs, tuple(int(item.page_size_bytes) for item in kv_caches.tensors))

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> KVStrataWorker:
        from kvstrata.vllm.worker import KVStrataWorker

        rank = 0 if self.replicated_layout else self.config.parallel.rank
        pages = self.pages(kv_caches)
        offset, size = rank * self.cpu_page_size_per_worker, self.cpu_page_size_per_worker
        if self.config.canonical_layout:
            offset, size = 0, canonical.area_bytes(pages, self.blocks_per_chunk)
        region = compat.open_region(self, rank)
        try:
            compat.pin_region(region)
            return KVStrataWorker(
                kv_caches,
                pages,
                region,
                area_offset=offset,
                area_bytes=size,
                blocks_per_chunk=self.blocks_per_chunk,
                self_test_slot=self.config.parallel.rank % self.num_chunks,
            )
        except Exception:
            region.cleanup()
            raise
