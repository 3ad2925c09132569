"""A rank with two small KV tensors and a row worker, and the jobs vLLM would give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    make_offload_key,
)

from kvstrata.vllm.rowspec import RowSpec
from kvstrata.vllm.rowworker import KVStrataRowWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata.memory.arena import Arena
    from kvstrata.memory.layout import PageRef

PAGE = 64
BLOCKS = 12
KEYS = [make_offload_key(bytes([number]) * 32, number % 2) for number in range(16)]


def gpu(blocks: list[int], sizes: list[int], first: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=first)


def row_spec(groups: list[int], chunks: Iterable[int], offsets: list[int]) -> RowSpec:
    return RowSpec(KEYS[: len(groups)], groups, list(chunks), offsets)


class Rank:
    """Two tensors of random bytes, the groups given, and their worker."""

    def __init__(
        self,
        arena: Arena,
        groups: tuple[tuple[PageRef, ...], ...],
        *,
        blocks_per_chunk: int = 1,
        seed: int = 1,
        rank: int = 0,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed + 100 * rank)
        count = BLOCKS if blocks_per_chunk == 1 else 20
        self.blocks = [
            torch.randint(1, 127, (count, PAGE), dtype=torch.int8, generator=generator)
            for _ in range(2)
        ]
        self.caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, PAGE) for tensor in self.blocks],
            group_data_refs=[
                [CanonicalKVCacheRef(ref.tensor_index, ref.page_bytes) for ref in refs]
                for refs in groups
            ],
        )
        self.worker = KVStrataRowWorker(
            self.caches, groups, arena, blocks_per_chunk=blocks_per_chunk, rank=rank, **options
        )
