"""What a row of each group takes, which groups are stored, and how much fits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from plugin_support.namespaces import BYTE_MAP, set_at
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import kvstrata
from kvstrata.vllm import geometry, table
from kvstrata.vllm.geometry import GroupGeometry, Support

COMMON: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**COMMON)
WINDOW = SlidingWindowSpec(**COMMON, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=128)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATE = MambaSpec(
    block_size=64,
    shapes=((3, 32), (2, 8)),
    dtypes=(torch.bfloat16, torch.bfloat16),
    page_size_padded=4096,
    mamba_cache_mode="align",
)


@dataclass(frozen=True)
class Unknown(KVCacheSpec):
    """A kind that nobody knows the pages of."""

    @property
    def page_size_bytes(self) -> int:
        return 64

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:  # noqa: ARG002
        return 64


class Helper(FullAttentionSpec):
    """Kept for the requests under way only."""

    @property
    def prefix_cacheable(self) -> bool:
        return False


HELPER = Helper(**COMMON)


def config_of(*specs: KVCacheSpec, layers: int = 1) -> Any:
    groups = [
        KVCacheGroupSpec([f"l.{number}.{layer}" for layer in range(layers)], spec)
        for number, spec in enumerate(specs)
    ]
    tensors = [
        KVCacheTensor(
            size=1 << 20,
            layers=[name for group in groups for name in group.layer_names],
            layer_stride=0,
            block_stride=4096,
        )
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=tensors, kv_cache_groups=groups)


def test_a_block_takes_the_unpadded_pages_of_its_layers() -> None:
    found = geometry.describe(config_of(FULL, WINDOW, STATE, LATENT, layers=3))
    assert [group.bytes_per_block for group in found] == [
        3 * 2 * 16 * 2 * 32 * 2,
        3 * 2 * 16 * 2 * 32 * 2,
        3 * (3 * 32 + 2 * 8) * 2,
        3 * 16 * 576 * 2,
    ]
    assert [group.window for group in found] == [None, 64, 0, None]
    assert not any(group.padded for group in found)


def test_where_layers_of_several_sizes_hide_behind_one_specification_padding_is_counted() -> None:
    config = config_of(FULL, layers=2)
    first, second = config.kv_cache_groups[0].layer_names
    config.kv_cache_tensors[:] = [
        KVCacheTensor(size=1, layers=[first], layer_stride=0, block_stride=4096),
        KVCacheTensor(size=1, layers=[second], layer_stride=0, block_stride=8192),
    ]
    (found,) = geometry.describe(config)
    assert (found.bytes_per_block, found.padded) == (4096 + 8192, True)


def test_it_travels_as_plain_json() -> None:
    extra: dict[str, Any] = {}
    config = config_of(FULL, WINDOW)
    geometry.put(extra, config, None)
    extra = json.loads(json.dumps(extra))
    assert geometry.groups_of(extra) == geometry.describe(config)
    assert geometry.support_of(extra) == geometry.support(config)
    assert geometry.groups_of({}) == []


@pytest.mark.parametrize(
    ("spec", "verdict", "reason"),
    [
        (FULL, "stored", ""),
        (WINDOW, "stored", ""),
        (CHUNKED, "stored", ""),
        (LATENT, "stored", ""),
        (STATE, "stored", ""),
        (HELPER, "skipped", "vLLM's prefix cache does not find it again"),
    ],
)
def test_every_kind_of_group_has_a_verdict(spec: KVCacheSpec, verdict: str, reason: str) -> None:
    (found,) = geometry.support(config_of(spec))
    assert found == Support(0, type(spec).__name__, verdict, reason)


def test_a_kind_that_nobody_knows_is_refused_by_name() -> None:
    config = config_of(FULL, Unknown(block_size=16))
    if not config.kv_cache_groups[1].kv_cache_spec.prefix_cacheable:
        pytest.skip("this vLLM leaves kinds it does not know out")
    assert [one.verdict for one in geometry.support(config)] == ["stored", "refused"]
    with pytest.raises(kvstrata.ConfigError, match=r"group 1 \(Unknown\)"):
        geometry.describe(config)


def test_a_helper_group_is_named_and_skipped_and_the_others_are_stored() -> None:
    sizes = [(FullAttentionSpec, 3584), (Helper, 4), (FullAttentionSpec, 64)]
    config = config_of(*(kind(**{**COMMON, "block_size": size}) for kind, size in sizes))
    support = geometry.support(config)
    assert [one.verdict for one in support] == ["stored", "skipped", "stored"]
    found = geometry.describe(config)
    assert [(group.group_id, group.tokens_per_block) for group in found] == [(0, 3584), (2, 64)]
    capacity = table.Capacity(1, 1, {0: 1, 2: 1}, {0: 1, 2: 1})
    text = table.lines(capacity, found, support, blocks_per_chunk=1, max_tokens=0)
    assert "group 1 (Helper): skipped, vLLM's prefix cache does not find it again" in text


def test_a_group_that_takes_no_part_in_transfers_is_skipped() -> None:
    config = config_of(FULL, FULL)
    config.kv_cache_groups[1].enable_kv_transfer = False
    assert geometry.support(config)[1] == Support(
        1, "FullAttentionSpec", "skipped", "it takes no part in KV transfers"
    )


def test_rows_hold_all_ranks_and_blocks_of_a_chunk() -> None:
    two = {**BYTE_MAP, "groups": [*BYTE_MAP["groups"], {"id": 3, "bytes_per_block": 384}]}
    assert geometry.row_bytes(two, ranks=2, blocks_per_chunk=3) == {0: 6 * 8192, 3: 6 * 384}
    assert geometry.row_bytes(set_at(two, "groups/1/bytes_per_block", 1), 1, 1)[3] == 1


@pytest.mark.parametrize(
    ("specs", "spare"),
    [
        ((FULL,), {0: 0}),
        ((FULL, SlidingWindowSpec(**COMMON, sliding_window=32)), {0: 0, 1: 2}),
        # A hit of a prompt that ends with the chunk ends one token before it.
        ((FULL, SlidingWindowSpec(**COMMON, sliding_window=33)), {0: 0, 1: 1}),
        ((FULL, WINDOW, CHUNKED), {0: 0, 1: 0, 2: 0}),
        # Chunks of two lengths: a hit may end within the longer one.
        ((STATE, SlidingWindowSpec(**COMMON, sliding_window=32)), {0: 3, 1: 0}),
        # A group that is not stored may bound hits anywhere.
        ((HELPER, SlidingWindowSpec(**COMMON, sliding_window=32)), {1: 0}),
    ],
)
def test_a_chunk_may_lack_the_blocks_that_no_hit_asks_for(
    specs: tuple[KVCacheSpec, ...], spare: dict[int, int]
) -> None:
    extra: dict[str, Any] = {}
    geometry.put(extra, config_of(*specs), None)
    assert geometry.spare_heads(extra, blocks_per_chunk=4) == spare


def group(number: int, window: int | None, tokens: int = 16) -> GroupGeometry:
    return GroupGeometry(number, "Spec", 1, tokens, 1, padded=False, window=window)


@pytest.mark.parametrize(
    ("groups", "slots", "length", "tokens"),
    [
        # 36 groups that look back without a bound: each slot is 1/36 of 16 tokens.
        ([group(n, None) for n in range(36)], 36 * 100, 1600, 1600),
        # One full group (2304 chunks of 36864 tokens), one window of 4 chunks, one state.
        ([group(0, None), group(1, 64), group(2, 0)], 4000, 36864, 4000 * 36864 // 2309),
        # A request shorter than the window keeps no more than it has.
        ([group(0, None), group(1, 64)], 100, 32, 100 * 32 // 4),
    ],
)
def test_capacity_in_tokens_counts_what_each_group_keeps_of_a_request(
    groups: list[GroupGeometry], slots: int, length: int, tokens: int
) -> None:
    sizes = {each.group_id: 64 for each in groups}
    capacity = table.Capacity(slots * 64, slots * 64, sizes, dict.fromkeys(sizes, slots))
    assert capacity.tokens(groups, length, 1) == tokens


def test_unequal_slots_count_with_their_own_bytes() -> None:
    capacity = table.Capacity(0, 7000, {0: 1000, 1: 100}, {0: 7, 1: 70})
    groups = [group(0, None), group(1, 16)]
    # Per request of 32 tokens: two rows of 1000 and one of 100 bytes.
    assert capacity.tokens(groups, 32, 1) == 7000 * 32 // 2100
    # Two blocks per chunk: one row each.
    assert capacity.tokens(groups, 32, 2) == 7000 * 32 // 1100


def test_the_table_says_sizes_slots_tokens_and_what_is_shared() -> None:
    groups = [group(0, None), group(1, 64), group(2, 0)]
    support = [Support(number, "Spec", "stored") for number in range(3)]
    capacity = table.Capacity(
        1 << 30, 1 << 30, {0: 1 << 20, 1: 1 << 20, 2: 4096}, {0: 1024, 1: 1024, 2: 262144}
    )
    text = table.lines(
        capacity, groups, support, blocks_per_chunk=1, max_tokens=32768, notes=["a note"]
    )
    rest = "slots if all are its own"
    small = f"4 KiB per slot, 262144 {rest}"
    assert text == [
        "CPU tier: 1 GiB requested, 1 GiB usable",
        "fits 16256 tokens of requests of 8192 or 16352 tokens of requests of 32768",
        f"group 0 (Spec, 1 layers, 16 tokens per block): 1 MiB per slot, 1024 {rest}",
        f"group 1 (Spec, 1 layers, 16 tokens per block, keeps 64): 1 MiB per slot, 1024 {rest}",
        f"group 2 (Spec, 1 layers, 16 tokens per block, keeps one state): {small}",
        "groups [0, 1] share their slots; memory moves between slot sizes in slabs",
        "a note",
    ]
