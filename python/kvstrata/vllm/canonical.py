"""Rows in vLLM's canonical layout: a page holds all heads, whichever rank has them.

vLLM derives, for every rank, which bytes of its page go where in the canonical page (option
`canonical_layout`). Here that derivation is not taken on trust: each rank maps every element of its
own tensors and accepts the result only where it is one dense page of all heads, in the order of the
rank's own page, with the rank's heads where its number says. Such a row is the same under any
tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_cache_interface import MLAAttentionSpec, group_kernel_blocks

from kvstrata.memory.layout import LayoutError, PageRef, PageRun, PageShare
from kvstrata.vllm import packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalPageMapping

    from kvstrata.memory.placement import IntArray

_ALIGNMENT = 4096
ORDER = "canonical pages, tensors, blocks"
# Which dimension of one block's tensor counts heads, by the number of dimensions: (heads, tokens,
# values), and (2, tokens, heads, values). Latent pages, (tokens, values), have none.
_HEADS = {2: None, 3: 0, 4: 2}


@dataclass(frozen=True)
class Pages:
    """References to pages that all ranks share; the size of these pages in a slot, per tensor."""

    groups: tuple[tuple[PageRef, ...], ...]
    slot_bytes: tuple[int, ...]


def pages(kv_caches: CanonicalKVCaches) -> Pages:
    """What a worker copies, from the mappings that vLLM derived.

    # Errors
    :class:`LayoutError` where a layer's page was not certified for any number of ranks.
    """
    sizes = [0] * len(kv_caches.tensors)
    groups = []
    for group_index, refs in enumerate(kv_caches.group_data_refs):
        made = []
        for ref in refs:
            mapping = ref.mapping
            if mapping is None or not mapping.parallelism_agnostic:
                msg = (
                    f"canonical_layout: vLLM cannot certify the pages of KV cache group "
                    f"{group_index} for any number of ranks; remove canonical_layout from "
                    "kv_connector_extra_config"
                )
                raise LayoutError(msg)
            size = int(mapping.canonical_page_size_bytes)
            share = PageShare(_runs(mapping), int(mapping.num_writers), int(mapping.writer_index))
            made.append(PageRef(int(ref.tensor_idx), size, 0, share))
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], size)
        groups.append(tuple(made))
    return Pages(tuple(groups), tuple(sizes))


def area_bytes(shared: Pages, blocks_per_chunk: int) -> int:
    """Bytes of a slot that hold pages, in whole memory pages: of the model, not of the ranks."""
    return -(-sum(shared.slot_bytes) * blocks_per_chunk // _ALIGNMENT) * _ALIGNMENT


def describe(tensor: torch.Tensor, num_blocks: int, ref: PageRef, rank: int) -> dict[str, Any]:
    """The canonical page of a layer: element type, shape and strides in bytes of all its heads.

    # Errors
    :class:`LayoutError` where the mapping does not make one dense page of the ranks' heads.
    """
    share = ref.share
    if share is None:
        msg = "a page without a share is no canonical page"
        raise LayoutError(msg)
    block = group_kernel_blocks(tensor, num_blocks)[0]
    item = int(block.element_size())
    count = block.numel()
    factor, rest = divmod(ref.page_bytes, count * item)
    if rest or block.dim() not in _HEADS:
        msg = f"a block of {tuple(block.shape)} is no part of a page of {ref.page_bytes} bytes"
        raise LayoutError(msg)
    here = _offsets(block)
    where = _mapped(here, share.runs, count, item)
    axis = _HEADS[block.dim()]
    shape = list(block.shape)
    if factor > 1:
        if axis is None:
            msg = f"a block of {tuple(block.shape)} has no heads to share out"
            raise LayoutError(msg)
        shape[axis] *= factor
    strides = _strides(where, axis, shape)
    first = rank // share.writers * block.shape[axis] * strides[axis] if axis is not None else 0
    if share.writer != rank % share.writers or not np.array_equal(
        where, first + _grid(block.shape, strides)
    ):
        msg = (
            f"the page of rank {rank}, {tuple(block.shape)} with strides {tuple(block.stride())}, "
            f"does not go where its heads belong in {tuple(shape)}"
        )
        raise LayoutError(msg)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": shape,
        "strides": [
            stride * item if length > 1 else 0
            for length, stride in zip(shape, strides, strict=True)
        ],
    }


def bytes_per_block(
    kv_cache_config: KVCacheConfig, group_ids: Sequence[int], total_kv_heads: int
) -> dict[int, int | None]:
    """Bytes of one block of each group in a canonical row, by specification; see `packed`."""
    found = packed.bytes_per_block(kv_cache_config, group_ids)
    for group_id, size in found.items():
        group = kv_cache_config.kv_cache_groups[group_id]
        specs = {packed.spec_of(group.kv_cache_spec, layer) for layer in group.layer_names}
        factors = {_factor(spec, total_kv_heads) for spec in specs}
        found[group_id] = size * factors.pop() if size is not None and len(factors) == 1 else None
    return found


def _factor(spec: Any, total_kv_heads: int) -> int:
    if isinstance(spec, MLAAttentionSpec):
        return 1
    return max(1, total_kv_heads // int(spec.num_kv_heads))


def _runs(mapping: CanonicalPageMapping) -> tuple[PageRun, ...]:
    return tuple(
        PageRun(
            int(run.local_offset + index * run.local_stride),
            int(run.canonical_offset + index * run.canonical_stride),
            int(run.fragment_size),
        )
        for run in mapping.runs
        for index in range(run.num_fragments)
    )


def _offsets(block: torch.Tensor) -> IntArray:
    """Where each element of a block lies in its page, in elements."""
    offsets = _grid(block.shape, [int(stride) for stride in block.stride()])
    if not np.array_equal(np.sort(offsets, axis=None), np.arange(block.numel())):
        msg = f"a block of {tuple(block.shape)} with strides {tuple(block.stride())} has holes"
        raise LayoutError(msg)
    return offsets


def _grid(shape: Sequence[int], strides: Sequence[int]) -> IntArray:
    """For every index of `shape` the sum of its products with the strides."""
    total: IntArray = np.zeros(tuple(shape), dtype=np.int64)
    for dimension, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        along = [1] * len(shape)
        along[dimension] = length
        total = total + (np.arange(length, dtype=np.int64) * stride).reshape(along)
    return total


def _mapped(offsets: IntArray, runs: Sequence[PageRun], count: int, item: int) -> IntArray:
    """Where each element goes in the canonical page, in elements."""
    to: IntArray = np.full(count, -1, dtype=np.int64)
    for run in runs:
        parts = [run.block_offset // item, run.slot_offset // item, run.size // item]
        if any(part * item != whole for part, whole in zip(parts, _whole(run), strict=True)):
            msg = f"a run of {run.size} bytes cuts elements of {item} bytes"
            raise LayoutError(msg)
        start, goal, size = parts
        to[start : start + size] = goal + np.arange(size, dtype=np.int64)
    if (to < 0).any():
        msg = "some bytes of a page go nowhere"
        raise LayoutError(msg)
    mapped: IntArray = to[offsets]
    return mapped


def _whole(run: PageRun) -> tuple[int, int, int]:
    return run.block_offset, run.slot_offset, run.size


def _strides(where: IntArray, axis: int | None, shape: Sequence[int]) -> list[int]:
    """Strides of the canonical page, in elements: seen along each dimension but the heads'.

    That one is what makes the page dense: a rank with one head cannot see it.
    """
    origin = (0,) * where.ndim
    seen: dict[int, int] = {}
    for dimension, length in enumerate(where.shape):
        if length > 1 and dimension != axis:
            step = tuple(int(dimension == other) for other in range(where.ndim))
            seen[dimension] = int(where[step] - where[origin])
    strides = [seen.get(dimension, 0) for dimension in range(where.ndim)]
    heads = 1 if axis is None else shape[axis]
    dense, placed = 1, heads == 1
    for dimension in sorted(seen, key=seen.__getitem__):
        if not placed and axis is not None and seen[dimension] == dense * heads:
            strides[axis], dense, placed = dense, dense * heads, True
        if seen[dimension] != dense:
            msg = f"a page of {tuple(shape)} with strides {strides} is not dense"
            raise LayoutError(msg)
        dense *= shape[dimension]
    if not placed and axis is not None:
        strides[axis] = dense
    return strides
