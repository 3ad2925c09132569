"""A whole spec of ours with tensors of a model, one rank: scheduler's side and worker's side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvstrata.vllm import awaited, bytemap, exact, facts
from plugin_support.configs import offloading_config
from plugin_support.models import vllm_config
from plugin_support.steps import forget_the_cpu_tier, settle

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 12
TOKENS = 16


def model_of(layers_of_groups: tuple[int, ...], values: int) -> KVCacheConfig:
    """Groups of so many layers, all pages alike: (one head, 16 tokens, `values` elements)."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=values // 2, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"g{group}.{layer}" for layer in range(layers)], spec)
            for group, layers in enumerate(layers_of_groups)
        ],
    )


class Rig:
    """Groups overlay the same tensors, as vLLM allocates them: one tensor per layer of a group."""

    def __init__(
        self,
        engine_id: str,
        model_dir: Path,
        layers_of_groups: tuple[int, ...] = (2,),
        *,
        slots: str = "exact",
        tiers: tuple[dict[str, Any], ...] = (),
        blocks_per_chunk: int = 1,
        values: int = 40,
        chunks: int = 8,
        **extra: Any,
    ) -> None:
        self.config = model_of(layers_of_groups, values)
        self.blocks_per_chunk = blocks_per_chunk
        self.page = TOKENS * values * 2
        generator = torch.Generator().manual_seed(3)
        shape = (BLOCKS, self.page)
        self.blocks = [
            torch.randint(1, 127, shape, dtype=torch.int8, generator=generator)
            for _ in range(max(layers_of_groups))
        ]
        gathered = facts.gather(vllm_config(model_dir), self.config)
        named = {"tiers": list(tiers)} if slots == "exact" else {}
        made = offloading_config(
            engine_id,
            list(tiers) if slots == "uniform" else [],
            group_ids=tuple(range(len(layers_of_groups))),
            bytes_per_block=max(layers_of_groups) * self.page,
            blocks_per_chunk=blocks_per_chunk,
            chunks=chunks,
            extra={
                "spec_name": "KVStrataSpec",
                facts.KEY: gathered,
                awaited.KEY: True,
                exact.KEY: slots,
                **named,
                **extra,
            },
        )
        self.spec: Any = OffloadingSpecFactory.create_spec(made)
        self.worker: Any = self.spec.get_worker(self._caches(layers_of_groups))
        self.manager: Any = self.spec.get_manager()
        self.byte_map = self._describe(layers_of_groups)
        if slots == "exact":
            self.manager.open(self.byte_map)
        else:
            for tier in self.manager.secondary_tiers:
                tier.open(self.byte_map)
        self.count = 0

    def _caches(self, layers_of_groups: tuple[int, ...]) -> CanonicalKVCaches:
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, self.page) for tensor in self.blocks],
            [
                [CanonicalKVCacheRef(layer, self.page) for layer in range(layers)]
                for layers in layers_of_groups
            ],
        )

    def _describe(self, layers_of_groups: tuple[int, ...]) -> dict[str, Any]:
        seen = {
            f"g{group}.{layer}": self.blocks[layer].view(torch.bfloat16).view(BLOCKS, 1, TOKENS, -1)
            for group, layers in enumerate(layers_of_groups)
            for layer in range(layers)
        }
        ids = list(range(len(layers_of_groups)))
        return bytemap.describe(seen, self.config, ids, self.worker.layout, self.worker.addresses)

    def keys(self, count: int, group: int = 0, first: int = 0) -> list[Any]:
        return [
            make_offload_key(bytes([group, number]) * 16, group)
            for number in range(first, first + count)
        ]

    def request(self, keys: list[Any]) -> ReqContext:
        self.count += 1
        context = ReqContext(req_id=f"r{self.count}")
        self.manager.on_new_request(context)
        for number, key in enumerate(keys):
            span = TOKENS * self.blocks_per_chunk
            context.set_offload_key_position(key, (number + 1) * span)
        return context

    def gpu(self, count: int, group: int, first_block: int) -> GPULoadStoreSpec:
        groups = len(self.config.kv_cache_groups)
        blocks = count * self.blocks_per_chunk
        sizes = [blocks if at == group else 0 for at in range(groups)]
        ids = list(range(first_block, first_block + blocks))
        return GPULoadStoreSpec(ids, sizes, [0] * groups)

    def store(self, count: int, group: int = 0) -> None:
        """Chunks of a request from block 0 on."""
        keys = self.keys(count, group)
        context = self.request(keys)
        output = self.manager.prepare_store(keys, context)
        assert output.keys_to_store == keys
        self.worker.submit_store(1, self.gpu(count, group, 0), output.store_spec)
        assert [done.success for done in self.worker.get_finished()] == [True]
        self.manager.complete_store(set(keys), context)
        self.manager.on_request_finished(context)
        self.settle()

    def load(self, count: int, group: int = 0) -> int:
        """Look for the chunks, load those found into cleared blocks and compare; how many."""
        keys = self.keys(count, group)
        context = self.request(keys)
        deadline = time.monotonic() + 20
        while True:
            answers = [self.manager.lookup(key, context) for key in keys]
            if set(answers) <= {LookupResult.HIT, LookupResult.MISS}:
                break
            self.settle()
            assert time.monotonic() < deadline
        found = answers.index(LookupResult.MISS) if LookupResult.MISS in answers else count
        if found:
            self._load(keys[:found], group, context)
        self.manager.on_request_finished(context)
        return found

    def _load(self, keys: list[Any], group: int, context: ReqContext) -> None:
        layers = len(self.config.kv_cache_groups[group].layer_names)
        blocks = len(keys) * self.blocks_per_chunk
        before = [tensor.clone() for tensor in self.blocks]
        for tensor in self.blocks[:layers]:
            tensor[:blocks] = 0
        rows = self.manager.prepare_load(keys, context)
        self.worker.submit_load(2, rows, self.gpu(len(keys), group, 0))
        assert [done.success for done in self.worker.get_finished()] == [True]
        self.manager.complete_load(set(keys), context)
        for now, old in zip(self.blocks, before, strict=True):
            assert torch.equal(now, old), "a block is not what was stored"

    def settle(self) -> None:
        settle(self.manager)

    def forget_the_cpu_tier(self) -> None:
        forget_the_cpu_tier(self.manager)

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()
