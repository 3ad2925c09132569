"""What a row of each KV cache group takes, as the scheduler's side can tell from the configuration.

The workers derive the same from their tensors, and theirs is what slots are made of
(:mod:`kvstrata.vllm.handshake` compares the two). Here it serves to refuse early what cannot work,
and to say at the start what will fit.

Also which groups are stored at all. vLLM selects them: a group that its prefix cache cannot find
again, or that takes no part in transfers, is left out, and whatever was computed for it is computed
again after a hit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, iter_layer_specs

import kvstrata
from kvstrata.vllm import canonical, packed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig

KEY = "kvstrata_geometry"
SUPPORT_KEY = "kvstrata_support"

STORED = "stored"
SKIPPED = "skipped"
REFUSED = "refused"


@dataclass(frozen=True)
class GroupGeometry:
    """One group that is stored. Bytes are one rank's, or all ranks' where they share a page."""

    group_id: int
    kind: str
    layers: int
    tokens_per_block: int
    bytes_per_block: int
    # Whether these bytes count page padding, because the scheduler knows no better.
    padded: bool
    # How many tokens back the group looks; `None` without a bound, 0 for a single state.
    window: int | None
    # How many tokens before the end of a hit a load may ask for; `None` for all, 0 for a state.
    kept: int | None = None

    def chunks(self, tokens: int, blocks_per_chunk: int) -> int:
        """Rows that a request of so many tokens keeps of this group."""
        per_chunk = self.tokens_per_block * blocks_per_chunk
        count = -(-tokens // per_chunk)
        if self.window is None:
            return count
        return min(count, max(1, -(-self.window // per_chunk)))


@dataclass(frozen=True)
class Support:
    """What becomes of one group, and why."""

    group_id: int
    kind: str
    verdict: str
    reason: str = ""


def describe(kv_cache_config: KVCacheConfig, heads: int | None = None) -> list[GroupGeometry]:
    """The groups that are stored; `heads` is the model's number where ranks share pages.

    # Errors
    :class:`kvstrata.ConfigError` naming a group that cannot be stored.
    """
    refused = [one for one in support(kv_cache_config) if one.verdict == REFUSED]
    if refused:
        reasons = "; ".join(f"group {one.group_id} ({one.kind}): {one.reason}" for one in refused)
        msg = f"kvstrata cannot store this model's KV cache: {reasons}"
        raise kvstrata.ConfigError(msg)
    selected = get_offloading_group_ids(kv_cache_config)
    known: Mapping[int, int | None] = (
        packed.bytes_per_block(kv_cache_config, selected)
        if heads is None
        else canonical.bytes_per_block(kv_cache_config, selected, heads)
    )
    padded = _padded(kv_cache_config, selected)
    made = []
    for group_id in selected:
        group = kv_cache_config.kv_cache_groups[group_id]
        size = known[group_id]
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        made.append(
            GroupGeometry(
                group_id=group_id,
                kind=type(spec).__name__,
                layers=len(group.layer_names),
                tokens_per_block=int(group.kv_cache_spec.block_size),
                bytes_per_block=padded[group_id] if size is None else size,
                padded=size is None,
                window=_window(spec),
                kept=_kept(spec),
            )
        )
    return made


def put(extra_config: dict[str, Any], kv_cache_config: KVCacheConfig, heads: int | None) -> None:
    """Carry both into the spec, as plain JSON.

    # Errors
    As :func:`describe`.
    """
    extra_config[KEY] = [asdict(group) for group in describe(kv_cache_config, heads)]
    extra_config[SUPPORT_KEY] = [asdict(one) for one in support(kv_cache_config)]


def groups_of(extra_config: Mapping[str, Any]) -> list[GroupGeometry]:
    """The groups that are stored; none where no connector of ours said it."""
    return [GroupGeometry(**group) for group in extra_config.get(KEY, ())]


def support_of(extra_config: Mapping[str, Any]) -> list[Support]:
    """What becomes of each group; nothing where no connector of ours said it."""
    return [Support(**one) for one in extra_config.get(SUPPORT_KEY, ())]


def support(kv_cache_config: KVCacheConfig) -> list[Support]:
    """What becomes of each group of a model."""
    selected = set(get_offloading_group_ids(kv_cache_config))
    transferred = set(kv_cache_config.transfer_group_ids)
    found = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = list(iter_layer_specs(group.kv_cache_spec))
        kind = type(specs[0]).__name__
        odd = [spec for spec in specs if not isinstance(spec, (AttentionSpec, MambaSpec))]
        if group_id not in transferred:
            entry = Support(group_id, kind, SKIPPED, "it takes no part in KV transfers")
        elif group_id not in selected:
            entry = Support(group_id, kind, SKIPPED, "vLLM's prefix cache does not find it again")
        elif odd:
            reason = f"nobody knows the pages of a {type(odd[0]).__name__}"
            entry = Support(group_id, kind, REFUSED, reason)
        else:
            entry = Support(group_id, kind, STORED)
        found.append(entry)
    return found


def spare_heads(extra_config: Mapping[str, Any], blocks_per_chunk: int) -> dict[int, int]:
    """Per group id, how many blocks at the head of a chunk no load ever asks for.

    vLLM stores a chunk whose head has left the window, and a later hit that ends earlier than the
    request which stored it reaches further back. Hits end with a chunk, or one token before, where
    all groups have chunks of one length and all are stored; else anywhere.
    """
    groups = groups_of(extra_config)
    skipped = any(one.verdict == SKIPPED for one in support_of(extra_config))
    ends_with_chunk = not skipped and len({group.tokens_per_block for group in groups}) == 1
    spare = {}
    for group in groups:
        if group.kept is None:
            spare[group.group_id] = 0
        elif group.kept == 0:
            spare[group.group_id] = blocks_per_chunk - 1
        else:
            unasked = group.tokens_per_block * blocks_per_chunk - group.kept
            number = max(0, unasked // group.tokens_per_block)
            spare[group.group_id] = number if ends_with_chunk else 0
    return spare


def row_bytes(byte_map: Mapping[str, Any], ranks: int, blocks_per_chunk: int) -> dict[int, int]:
    """Payload bytes of a row per group id, from what the workers found out.

    `ranks` is 1 where all of them keep one copy together.
    """
    return {
        int(group["id"]): ranks * blocks_per_chunk * int(group["bytes_per_block"])
        for group in byte_map["groups"]
    }


def _padded(kv_cache_config: KVCacheConfig, selected: Sequence[int]) -> dict[int, int]:
    """Bytes of a block with the padding of its pages, from how far apart they lie."""
    outermost = packed.is_block_outermost(str(kv_cache_config.kv_cache_layout or ""))
    page = {
        layer: int(tensor.layer_stride if outermost else tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in tensor.layers
    }
    groups = kv_cache_config.kv_cache_groups
    return {
        group_id: sum(page.get(layer, 0) for layer in groups[group_id].layer_names)
        for group_id in selected
    }


def _window(spec: Any) -> int | None:
    if isinstance(spec, MambaSpec):
        return 0
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(spec, name, None)
        if size is not None:
            return int(size)
    return None


def _kept(spec: Any) -> int | None:
    window = _window(spec)
    return window + int(getattr(spec, "extra_retained_tokens", 0) or 0) if window else window
