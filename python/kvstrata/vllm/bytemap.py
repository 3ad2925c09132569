"""The byte map: which byte of a row means what, derived from the tensors a worker was given.

For every group: where the page of each of its layers lies in a rank's part of a row, how many bytes
of it count, and the order of heads, tokens and values inside a page (element type, shape and
strides of a block). Two rows may stand for each other only where all of this is equal; their sizes
say nothing about it. The layers' names are facts of their own; here they stand in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import group_kernel_blocks

from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstrata.memory.layout import Layout, PageRef

VERSION = 1
# Ranks side by side; in a rank's part the tensors one after the other; in a tensor's part its
# blocks. See kvstrata.memory.layout.
ORDER = "ranks, tensors, blocks"


def describe(
    kv_caches: Mapping[str, Any],
    kv_cache_config: KVCacheConfig,
    group_ids: Sequence[int],
    layout: Layout,
    addresses: Sequence[int],
    *,
    rank: int = 0,
) -> dict[str, Any]:
    """The byte map as a JSON object. A layer is its offset in bytes and the index of its page.

    `layout` is the one the worker copies by, with one reference per layer of a group or one for the
    whole block; `addresses` are where block 0 of its tensors lies in memory. Of pages that ranks
    share the map describes the whole page, and `rank` has to hold the part that is its own.

    # Errors
    :class:`LayoutError`, naming the group, where a tensor does not lie where the layout says.
    """
    return {
        "version": VERSION,
        "order": canonical.ORDER if is_shared(layout) else ORDER,
        "rank_bytes": _rank_bytes(layout),
        "groups": [
            _group(group_id, index, _Sight(kv_caches, kv_cache_config, layout, addresses, rank))
            for index, group_id in enumerate(group_ids)
        ],
    }


def _rank_bytes(layout: Layout) -> int | list[int]:
    """Bytes of a rank's part of a row; one number for each group where they are not alike."""
    sizes = [row.area.stop - row.area.start for row in layout.rows]
    return sizes[0] if len(set(sizes)) == 1 else sizes


def kernels(vllm_config: Any, layers: Iterable[str]) -> dict[str, list[str]]:
    """The layers that each attention backend serves, as the worker's model has them.

    A backend may order bytes within a block of one shape as it likes, and which one it is may
    depend on what is installed. On processors the instruction set is part of the name.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    context = getattr(compilation, "static_forward_context", None) or {}
    found: dict[str, list[str]] = {}
    for name in layers:
        layer: Any = context.get(name)
        if not hasattr(layer, "get_attn_backend"):
            continue
        instructions = getattr(layer, "isa", None)
        backend = str(layer.get_attn_backend().get_name())
        served = f"{backend} ({instructions})" if instructions else backend
        found.setdefault(served, []).append(name)
    return {backend: sorted(served) for backend, served in sorted(found.items())}


def is_shared(layout: Layout) -> bool:
    """Whether the ranks share the pages of a slot (the canonical layout)."""
    return any(ref.share is not None for refs in layout.groups for ref in refs)


def is_canonical(byte_map: Mapping[str, Any] | None) -> bool:
    """Whether a byte map describes rows that mean the same under any number of ranks."""
    return byte_map is not None and byte_map["order"] == canonical.ORDER


@dataclass(frozen=True)
class _Sight:
    """What a worker sees of its KV tensors."""

    kv_caches: Mapping[str, Any]
    config: KVCacheConfig
    layout: Layout
    addresses: Sequence[int]
    rank: int


def _group(group_id: int, index: int, sight: _Sight) -> dict[str, Any]:
    layout, kv_caches, config = sight.layout, sight.kv_caches, sight.config
    refs = layout.groups[index]
    names = [name for name in config.kv_cache_groups[group_id].layer_names if name in kv_caches]
    whole = len(refs) == 1 and len(names) != 1
    if not whole and len(refs) != len(names):
        msg = f"KV cache group {group_id} has {len(names)} layers and copies {len(refs)} pages"
        raise LayoutError(msg)
    area, spots = layout.rows[index].area, layout.rows[index].pages
    pages: list[dict[str, Any]] = []
    layers = []
    for position, name in enumerate(names):
        ref = refs[0 if whole else position]
        tensor = kv_caches[name]
        inside = tensor.data_ptr() - sight.addresses[ref.tensor_index]
        if not whole and inside != (0 if ref.share is not None else ref.page_offset):
            msg = (
                f"KV cache group {group_id}: layer {name} begins {inside} bytes into its block, "
                f"and the copies begin at {ref.page_offset}"
            )
            raise LayoutError(msg)
        page = _page(tensor, config.num_blocks, ref, sight.rank)
        if page not in pages:
            pages.append(page)
        start = spots[0 if whole else position].first - area.start + inside - ref.page_offset
        layers.append([start, pages.index(page)])
    return {
        "id": group_id,
        "bytes_per_block": layout.bytes_per_block(index),
        "block_stride": [spot.stride for spot in spots],
        "bytes": [ref.page_bytes for ref in refs],
        "layers": layers,
        "pages": pages,
    }


def _page(tensor: torch.Tensor, num_blocks: int, ref: PageRef, rank: int) -> dict[str, Any]:
    """One block of a tensor: strides in bytes, from the outermost dimension of the shape inwards.

    A dimension of one element has no stride that means anything.
    """
    if ref.share is not None:
        return canonical.describe(tensor, num_blocks, ref, rank)
    block = group_kernel_blocks(tensor, num_blocks)[0]
    size = tensor.element_size()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(block.shape),
        "strides": [
            stride * size if length > 1 else 0
            for length, stride in zip(block.shape, block.stride(), strict=True)
        ],
    }
