"""KV tensors as vLLM allocates and registers them, through our worker into exact rows and back.

Rows are compared with what the allocation's bytes say, by the configuration's own offsets.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from plugin_support.rows import gpu, row_spec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.worker.utils import allocate_kv_cache

from kvstrata.memory.arena import Arena
from kvstrata.vllm import bytemap, packed
from kvstrata.vllm.rowworker import KVStrataRowWorker

BLOCKS, TOKENS = 10, 16
COMMON: dict[str, Any] = {"block_size": TOKENS, "dtype": torch.float16}
FULL = FullAttentionSpec(**COMMON, num_kv_heads=4, head_size=64)
WIDE = FullAttentionSpec(**COMMON, num_kv_heads=8, head_size=64)
WINDOW = SlidingWindowSpec(**COMMON, num_kv_heads=4, head_size=64, sliding_window=64)
LATENT = MLAAttentionSpec(**COMMON, num_kv_heads=1, head_size=4 * 64 * 2)
PAGE = FULL.page_size_bytes
STATE = MambaSpec(
    block_size=TOKENS,
    shapes=((TOKENS * 4, 64), (TOKENS * 4 - 1, 64)),
    dtypes=(torch.float16, torch.float16),
    page_size_padded=PAGE,
)


def layers(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


def overlaid(*groups: tuple[str, int, Any]) -> KVCacheConfig:
    """Groups with pages of one size, each from the start of the allocation."""
    longest = max(count for _, count, _ in groups)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=PAGE * BLOCKS * longest,
                layers=layers(name, count),
                layer_stride=PAGE * BLOCKS,
                block_stride=PAGE,
            )
            for name, count, _ in groups
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(layers(name, count), spec) for name, count, spec in groups
        ],
    )


def unlike() -> KVCacheConfig:
    """One group, one specification per layer."""
    window = FULL.page_size_bytes + WIDE.page_size_bytes
    specs = {"a": FULL, "b": WIDE}
    tensors = [
        KVCacheTensor(
            size=window * BLOCKS,
            layers=[name],
            layer_stride=spec.page_size_bytes * BLOCKS,
            block_stride=spec.page_size_bytes,
            offset=0 if name == "a" else FULL.page_size_bytes * BLOCKS,
        )
        for name, spec in specs.items()
    ]
    group = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(["a", "b"], group)],
    )


def blocks_first() -> KVCacheConfig:
    """Two groups in one packed block: three layers, and two on the same bytes."""
    groups = {"full": (3, FULL), "window": (2, WINDOW)}
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=3 * PAGE * BLOCKS,
                layers=layers(name, count),
                layer_stride=PAGE,
                block_stride=3 * PAGE,
            )
            for name, (count, _) in groups.items()
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(layers(name, count), spec) for name, (count, spec) in groups.items()
        ],
    )
    config.kv_cache_layout = "BLHNC"
    return config


CONFIGS = {
    "per layer": overlaid(("full", 3, FULL)),
    "sliding window": overlaid(("full", 2, FULL), ("window", 2, WINDOW), ("more", 2, WINDOW)),
    "ten and four layers": overlaid(("full", 10, FULL), ("window", 4, WINDOW)),
    "latent": overlaid(("latent", 3, LATENT)),
    "padded states": overlaid(("full", 3, FULL), ("state", 3, STATE), ("less", 2, STATE)),
    "unlike layers": unlike(),
    "packed": blocks_first(),
}


def unpadded(spec: Any, layer: str) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[layer]
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(spec.unpadded_page_size_bytes)


class Registered:
    """One rank: vLLM's tensors, vLLM's registration, our worker."""

    def __init__(self, config: KVCacheConfig, arena: Arena, per_chunk: int) -> None:
        self.config, self.per_chunk = config, per_chunk
        layout = "BLHNC" if config.kv_cache_layout else "LBHNC"
        self.caches = allocate_kv_cache(
            config,
            torch.device("cpu"),
            KVCacheLayout[layout],
            [TOKENS] * len(config.kv_cache_groups),
        )
        storages = {
            tensor.untyped_storage().data_ptr(): tensor
            for cache in self.caches.values()
            for tensor in (cache if isinstance(cache, list | tuple) else [cache])
        }
        (any_of_it,) = storages.values()
        whole = torch.tensor([], dtype=torch.uint8).set_(any_of_it.untyped_storage())
        self.raw = whole.numpy()
        self.raw[:] = np.random.default_rng(3).integers(1, 256, self.raw.size, np.uint8)
        spec = MagicMock(spec=OffloadingSpec)
        spec.replicated_layout = False
        spec.get_worker.side_effect = lambda caches: self._worker(caches, layout, arena)
        vllm_config = MagicMock()
        parallel = vllm_config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = 1
        parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 1
        parallel.cp_kv_cache_interleave_size = 1
        parallel.rank = 0
        vllm_config.model_config.get_total_num_kv_heads.return_value = 4
        made = OffloadingConnectorWorker(spec, vllm_config, config)
        made.register_kv_caches(self.caches)
        self.worker: Any = made.worker

    def _worker(self, caches: Any, layout: str, arena: Arena) -> KVStrataRowWorker:
        selected = range(len(self.config.kv_cache_groups))
        groups = packed.group_refs(caches, packed.pages(self.config, list(selected)), layout)
        return KVStrataRowWorker(
            caches, groups, arena, blocks_per_chunk=self.per_chunk, self_test_at=0
        )

    def page(self, group: int, layer: str, block: int) -> slice:
        (tensor,) = [each for each in self.config.kv_cache_tensors if layer in each.layers]
        start = tensor.offset + tensor.layers.index(layer) * tensor.layer_stride
        start += block * tensor.block_stride
        spec = self.config.kv_cache_groups[group].kv_cache_spec
        return slice(start, start + unpadded(spec, layer))

    def row(self, group: int, blocks: list[int]) -> bytes:
        names = self.config.kv_cache_groups[group].layer_names
        return b"".join(
            self.raw[self.page(group, name, block)].tobytes() for name in names for block in blocks
        )


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_groups_row_is_its_layers_pages_and_nothing_else(
    name: str, per_chunk: int, engine_id: str
) -> None:
    config = CONFIGS[name]
    with contextlib.closing(Arena.create(1 << 20, engine_id)) as arena:
        rank = Registered(config, arena, per_chunk)
        count = len(config.kv_cache_groups)
        for group in range(count):
            arena.tensor.fill_(0x5A)
            blocks = [7, 2, 5][:per_chunk]
            sizes, first = [0] * count, [0] * count
            sizes[group] = per_chunk
            wanted = rank.row(group, blocks)
            assert rank.worker.layout.row_bytes(group) == len(wanted)
            rank.worker.submit_store(1, gpu(blocks, sizes, first), row_spec([group], [0], [4096]))
            assert not rank.worker.take_refused()
            assert bytes(arena.buffer[4096 : 4096 + len(wanted)]) == wanted
            assert set(bytes(arena.buffer[:4096])) == {0x5A}
            assert set(bytes(arena.buffer[4096 + len(wanted) :])) == {0x5A}
            others = [9, 0, 4][:per_chunk]
            before = rank.raw.copy()
            rank.worker.submit_load(2, row_spec([group], [0], [4096]), gpu(others, sizes, first))
            assert rank.row(group, others) == wanted
            for layer in config.kv_cache_groups[group].layer_names:
                for block in others:
                    at = rank.page(group, layer, block)
                    before[at] = rank.raw[at]
            assert np.array_equal(before, rank.raw), "a load wrote beside its pages"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_byte_map_of_exact_rows_says_where_each_layer_lies(name: str, engine_id: str) -> None:
    config = CONFIGS[name]
    with contextlib.closing(Arena.create(1 << 20, engine_id)) as arena:
        rank = Registered(config, arena, 2)
        if any(isinstance(cache, list | tuple) for cache in rank.caches.values()):
            pytest.skip("a state of several tensors has no one shape")
        selected = list(range(len(config.kv_cache_groups)))
        told = bytemap.describe(
            rank.caches, config, selected, rank.worker.layout, rank.worker.addresses
        )
        parts = []
        for group in told["groups"]:
            names = config.kv_cache_groups[group["id"]].layer_names
            sizes = [unpadded(config.kv_cache_groups[group["id"]].kv_cache_spec, n) for n in names]
            assert group["bytes"] == group["block_stride"] == sizes
            assert [start for start, _ in group["layers"]] == [
                2 * sum(sizes[:position]) for position in range(len(sizes))
            ]
            parts.append(2 * sum(sizes))
        assert told["rank_bytes"] == (parts[0] if len(set(parts)) == 1 else parts)
