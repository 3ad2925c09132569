"""Which bytes of a packed block belong to which KV cache group.

In a layout with the block outermost, all layers of all groups share one block, and vLLM's
connector hands the worker that whole block for every group: a store of one group would carry the
bytes that other groups' layers left in the block.
:class:`kvstrata.vllm.connector.KVStrataConnector` sees where each layer lies and puts it under
:data:`KEY` into the extra configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

import kvstrata
from kvstrata.memory.layout import PageRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches

KEY = "kvstrata_packed_pages"


def pages(kv_cache_config: KVCacheConfig, group_ids: Sequence[int]) -> list[list[list[int]]] | None:
    """Offset and size of each layer's page within a block, per group, as plain JSON.

    `None` for every layout but the one that puts whole pages side by side in a block.
    """
    if not str(kv_cache_config.kv_cache_layout or "").startswith("BL"):
        return None
    offsets = {
        layer: int(tensor.offset + index * tensor.layer_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, layer in enumerate(tensor.layers)
    }
    return [
        [
            [offsets[layer], _unpadded(group.kv_cache_spec, layer)]
            for layer in group.layer_names
            if layer in offsets
        ]
        for group in (kv_cache_config.kv_cache_groups[group_id] for group_id in group_ids)
    ]


def group_refs(
    kv_caches: CanonicalKVCaches,
    packed_pages: list[list[list[int]]] | None,
    layout: str | None,
) -> tuple[tuple[PageRef, ...], ...]:
    """Each group's references, narrowed to its own bytes where all groups name one packed block.

    `layout` is vLLM's name of the KV cache layout. It decides, because groups of one layer each
    that overlay one tensor have the same references as groups in a packed block.

    # Errors
    :class:`kvstrata.ConfigError` where groups share a packed block and nobody said whose is what.
    """
    given = tuple(
        tuple(PageRef(int(ref.tensor_idx), int(ref.page_size_bytes)) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    if not is_block_outermost(layout) or not _is_one_block(kv_caches):
        return given
    if packed_pages is not None and len(packed_pages) == len(given) and all(packed_pages):
        return tuple(
            tuple(PageRef(0, size, offset) for offset, size in group) for group in packed_pages
        )
    if len(given) == 1:
        return given
    msg = (
        f"{len(given)} KV cache groups share one packed block, and this connector does not say "
        "which bytes are whose: use kv_connector=KVStrataConnector, or set spec_name to "
        "TieringOffloadingSpec"
    )
    raise kvstrata.ConfigError(msg)


def bytes_per_block(
    kv_cache_config: KVCacheConfig, group_ids: Sequence[int]
) -> dict[int, int | None]:
    """Unpadded bytes of one block of each group by its specification.

    `None` where layers of different sizes may hide behind one specification: a scheduler's
    configuration keeps one of them for the whole group.
    """
    groups = kv_cache_config.kv_cache_groups
    outermost = is_block_outermost(str(kv_cache_config.kv_cache_layout or ""))
    strides = {
        layer: int(tensor.layer_stride if outermost else tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in tensor.layers
    }
    found: dict[int, int | None] = {}
    for group_id in group_ids:
        group = groups[group_id]
        alike = len({strides.get(layer) for layer in group.layer_names}) == 1
        sizes = [_unpadded(group.kv_cache_spec, layer) for layer in group.layer_names]
        found[group_id] = sum(sizes) if alike else None
    return found


def is_block_outermost(layout: str | None) -> bool:
    """Whether a layout's name begins with the block: all layers of a block lie side by side."""
    return (layout or "").startswith("B")


def _is_one_block(kv_caches: CanonicalKVCaches) -> bool:
    """The shape vLLM's connector gives a packed layout: one tensor, and every group all of it."""
    if len(kv_caches.tensors) != 1:
        return False
    page = kv_caches.tensors[0].page_size_bytes
    return all(
        len(refs) == 1 and refs[0].page_size_bytes == page for refs in kv_caches.group_data_refs
    )


def spec_of(spec: Any, layer: str) -> Any:
    """The specification of one layer of a group."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _unpadded(spec: Any, layer: str) -> int:
    spec = spec_of(spec, layer)
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(spec.unpadded_page_size_bytes)
