"""What a worker says of its bytes, derived from its tensors, and what ranks agree on."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plugin_support.geometry import layout as slot_layout
from plugin_support.models import make_model
from plugin_support.namespaces import identity, make_namespace
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.utils import allocate_kv_cache

import kvstrata
from kvstrata.memory.layout import LayoutError
from kvstrata.vllm import bytemap, handshake
from kvstrata.vllm.handshake import WorkerFacts

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, HEADS, TOKENS, VALUES, LAYERS = 6, 2, 16, 64, 2
ELEMENT = 2
PAGE = HEADS * TOKENS * VALUES * ELEMENT


def one_group(num_blocks: int = BLOCKS) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=VALUES // 2, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"l.{i}" for i in range(LAYERS)], spec)],
    )


def head_layer_token_value() -> torch.Tensor:
    """A block as (head, layer, token, value), seen by layer: (layer, block, head, token, value)."""
    block = torch.zeros(BLOCKS, HEADS, LAYERS, TOKENS, VALUES, dtype=torch.bfloat16)
    return block.permute(2, 0, 1, 3, 4)


def layer_head_token_value() -> torch.Tensor:
    """A block as (layer, head, token, value), seen by layer."""
    block = torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, VALUES, dtype=torch.bfloat16)
    return block.permute(1, 0, 2, 3, 4)


def whole_block_map(layers: torch.Tensor) -> dict[str, Any]:
    """The byte map where a row is a whole block of all layers."""
    slots = slot_layout(pages=(LAYERS * PAGE,), groups=(((0, LAYERS * PAGE),),))
    caches = {f"l.{index}": layers[index] for index in range(LAYERS)}
    return bytemap.describe(caches, one_group(), [0], slots, [layers.data_ptr()])


def test_two_orders_of_equal_size_are_two_namespaces_without_a_common_row(
    tmp_path: Path, root: Path
) -> None:
    """Heads before layers under one runner, layers before heads under another: equal sizes."""
    old, new = head_layer_token_value(), layer_head_token_value()
    assert old.numel() == new.numel()
    maps = [whole_block_map(layers) for layers in (old, new)]
    assert [m["groups"][0]["bytes_per_block"] for m in maps] == [LAYERS * PAGE] * 2
    assert maps[0]["groups"] != maps[1]["groups"]
    model_dir = make_model(tmp_path / "m")
    fields = [identity(model_dir, byte_map=m) for m in maps]
    first, second = (make_namespace(root, f, row_bytes=LAYERS * PAGE) for f in fields)
    assert first != second
    keys = [bytes([index]) * 32 + bytes(4) for index in range(8)]
    store_rows(root, fields[0], keys)
    assert loaded_rows(root, fields[1], keys) == 0
    assert loaded_rows(root, fields[0], keys) == len(keys)
    # Forced together by hand: the files of one under the name of the other.
    for file in (first / "rows" / "g0").iterdir():
        (second / "rows" / "g0").mkdir(mode=0o700, parents=True, exist_ok=True)
        file.rename(second / "rows" / "g0" / file.name)
    assert loaded_rows(root, fields[1], keys) == 0


def store_rows(root: Path, fields: dict[str, Any], keys: list[bytes]) -> None:
    arena = bytearray(b"a" * LAYERS * PAGE * len(keys))
    with opened(root, fields, arena) as tier:
        tier.store(1, keys, [index * LAYERS * PAGE for index in range(len(keys))])
        assert tier.wait(20)[0].outcomes == ["ok"] * len(keys)


def loaded_rows(root: Path, fields: dict[str, Any], keys: list[bytes]) -> int:
    arena = bytearray(LAYERS * PAGE * len(keys))
    with opened(root, fields, arena) as tier:
        found = tier.lookup(keys).count(True)
        tier.load(1, keys, [index * LAYERS * PAGE for index in range(len(keys))])
        (result,) = tier.wait(20)
    assert result.outcomes.count("ok") == found
    assert arena.count(b"a") == found * LAYERS * PAGE
    return found


def opened(root: Path, fields: dict[str, Any], arena: bytearray) -> kvstrata.Tier:
    return kvstrata.open_tier(
        root,
        manifest=fields,
        row_bytes=LAYERS * PAGE,
        arena=arena,
        capacity="16MiB",
        min_free=0,
    )


def allocated(layout: str, window: int | None = None) -> tuple[KVCacheConfig, dict[str, Any]]:
    """KV tensors as both runners of vLLM allocate them, in a layout of vLLM's."""
    common: dict[str, Any] = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": VALUES // 2,
        "dtype": torch.bfloat16,
    }
    full = FullAttentionSpec(**common)
    groups = [KVCacheGroupSpec(["l.0", "l.1"], full)]
    if window is not None:
        spec = SlidingWindowSpec(**common, sliding_window=window)
        groups.append(KVCacheGroupSpec(["l.2", "l.3"], spec))
    page = full.page_size_bytes
    first = layout.startswith("B")
    tensors = [
        KVCacheTensor(
            size=LAYERS * page * BLOCKS,
            layers=list(group.layer_names),
            layer_stride=page if first else page * BLOCKS,
            block_stride=page * LAYERS if first else page,
        )
        for group in groups
    ]
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)
    return config, allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])


def map_of(layout: str) -> dict[str, Any]:
    config, caches = allocated(layout)
    if layout.startswith("B"):
        slots = slot_layout(pages=(LAYERS * PAGE,), groups=(((0, PAGE, 0), (0, PAGE, PAGE)),))
        addresses = [caches["l.0"].data_ptr()]
    else:
        slots = slot_layout(pages=(PAGE, PAGE), groups=(((0, PAGE), (1, PAGE)),))
        addresses = [caches[name].data_ptr() for name in ("l.0", "l.1")]
    return bytemap.describe(caches, config, [0], slots, addresses)


def test_each_layout_of_vllms_that_orders_a_page_differently_has_another_byte_map() -> None:
    by_head, by_token = map_of("LBHNC"), map_of("LBNHC")
    assert by_head["groups"][0]["pages"] == [
        {
            "dtype": "bfloat16",
            "shape": [HEADS, TOKENS, VALUES],
            "strides": [TOKENS * VALUES * ELEMENT, VALUES * ELEMENT, ELEMENT],
        }
    ]
    assert by_token["groups"][0]["pages"][0]["strides"] == [
        VALUES * ELEMENT,
        HEADS * VALUES * ELEMENT,
        ELEMENT,
    ]
    assert by_head["groups"][0]["bytes_per_block"] == by_token["groups"][0]["bytes_per_block"]


def test_a_packed_block_with_the_same_pages_in_the_same_places_is_the_same_row() -> None:
    """The bytes of a row decide, not where a block lies in the device's memory."""
    outer, packed = map_of("LBHNC"), map_of("BLHNC")
    assert outer["groups"][0]["pages"] == packed["groups"][0]["pages"]
    assert outer["groups"][0]["layers"] == packed["groups"][0]["layers"] == [[0, 0], [PAGE, 0]]


def test_the_number_of_blocks_is_no_part_of_the_map() -> None:
    maps = []
    for blocks in (4, 9):
        layers = torch.zeros(LAYERS, blocks, HEADS, TOKENS, VALUES, dtype=torch.bfloat16)
        slots = slot_layout(pages=(PAGE, PAGE), groups=(((0, PAGE), (1, PAGE)),))
        caches = {f"l.{i}": layers[i] for i in range(LAYERS)}
        addresses = [layers[i].data_ptr() for i in range(LAYERS)]
        maps.append(bytemap.describe(caches, one_group(blocks), [0], slots, addresses))
    assert maps[0] == maps[1]


def test_kernel_blocks_within_a_block_are_part_of_the_map() -> None:
    config, caches = allocated("LBHNC")
    slots = slot_layout(pages=(PAGE, PAGE), groups=(((0, PAGE), (1, PAGE)),))
    addresses = [caches[name].data_ptr() for name in ("l.0", "l.1")]
    split = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout.LBHNC, kernel_block_sizes=[TOKENS // 2]
    )
    whole = bytemap.describe(caches, config, [0], slots, addresses)
    addresses = [split[name].data_ptr() for name in ("l.0", "l.1")]
    halves = bytemap.describe(split, config, [0], slots, addresses)
    assert halves["groups"][0]["pages"][0]["shape"] == [2, HEADS, TOKENS // 2, VALUES]
    assert halves != whole


def test_a_tensor_that_does_not_lie_where_the_copies_begin_is_refused_naming_the_group() -> None:
    config, caches = allocated("BLHNC")
    slots = slot_layout(pages=(LAYERS * PAGE,), groups=(((0, PAGE, PAGE), (0, PAGE, 0)),))
    with pytest.raises(LayoutError, match=rf"group 0: layer l\.0 begins 0 .* begin at {PAGE}"):
        bytemap.describe(caches, config, [0], slots, [caches["l.0"].data_ptr()])
    wrong = slot_layout(pages=(LAYERS * PAGE,), groups=(((0, PAGE),) * 3,))
    with pytest.raises(LayoutError, match="group 0 has 2 layers and copies 3 pages"):
        bytemap.describe(caches, config, [0], wrong, [caches["l.0"].data_ptr()])


def worker_facts(rank: int, **over: Any) -> WorkerFacts:
    made = WorkerFacts.of(rank, over.pop("byte_map", map_of("LBHNC")))
    return dataclasses.replace(made, **over)


def told(*ranks: WorkerFacts) -> dict[tuple[int, int], WorkerFacts]:
    return {
        (0, item.rank): pickle.loads(pickle.dumps(item))  # noqa: S301 -- as vLLM does between processes
        for item in ranks
    }


def test_ranks_that_agree_give_one_byte_map() -> None:
    assert handshake.agreed(told(worker_facts(1), worker_facts(0)), 2) == map_of("LBHNC")


def test_ranks_that_lay_bytes_out_differently_are_refused_naming_ranks_and_group() -> None:
    other = worker_facts(1, byte_map=map_of("LBNHC"))
    with pytest.raises(kvstrata.ConfigError, match=r"ranks 0 and 1 .* group 0 .*\(pages\)"):
        handshake.agreed(told(worker_facts(0), other), 2)
    larger = copy.deepcopy(map_of("LBHNC")) | {"rank_bytes": 1}
    with pytest.raises(kvstrata.ConfigError, match="ranks 0 and 1"):
        handshake.agreed(told(worker_facts(0), worker_facts(1, byte_map=larger)), 2)


def test_every_rank_has_to_say_how_its_bytes_lie() -> None:
    with pytest.raises(kvstrata.ConfigError, match=r"ranks \[0\] of 2"):
        handshake.agreed(told(worker_facts(0)), 2)
    with pytest.raises(kvstrata.ConfigError, match=r"ranks \[\] of 1"):
        handshake.agreed({(0, 0): object()}, 1)


def test_a_byte_map_that_is_not_the_one_that_was_sent_is_refused() -> None:
    with pytest.raises(kvstrata.ConfigError, match="rank 1 is not the one it sent"):
        handshake.agreed(told(worker_facts(0), worker_facts(1, digest="0" * 64)), 2)


def test_ranks_on_two_hosts_are_refused_naming_both() -> None:
    other = worker_facts(1, host="node-b", boot="another")
    with pytest.raises(kvstrata.ConfigError, match=r"'node-a'.*'node-b'"):
        handshake.agreed(told(worker_facts(0, host="node-a"), other), 2)


def test_a_group_whose_specification_has_other_bytes_is_refused_naming_it_and_both_sizes() -> None:
    byte_map = map_of("LBHNC")
    handshake.check_sides(byte_map, {0: 2 * PAGE})
    handshake.check_sides(byte_map, {0: None})
    with pytest.raises(kvstrata.ConfigError, match=rf"group 0 has {2 * PAGE + 8} .*{2 * PAGE}"):
        handshake.check_sides(byte_map, {0: 2 * PAGE + 8})
    with pytest.raises(kvstrata.ConfigError, match=r"groups \[0\].*\[0, 1\]"):
        handshake.check_sides(byte_map, {0: 2 * PAGE, 1: PAGE})


def test_both_runners_of_this_release_lay_their_bytes_out_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 0.32 and 0.33 both allocate by the same function: one namespace, and rightly so."""
    config, _ = allocated("LBHNC")
    device = torch.device("cpu")
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC)
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"))
    monkeypatch.setattr(gpu_model_runner, "bind_kv_cache", lambda *_, **__: None)
    monkeypatch.setattr(attn_utils, "bind_kv_cache_to_layers", lambda *_, **__: None)
    monkeypatch.setattr(attn_utils, "get_shared_kv_cache_layers", lambda _: {})
    v1: Any = SimpleNamespace(
        device=device,
        cache_config=cache,
        model_config=model,
        shared_kv_cache_layers={},
        attn_groups=[],
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_caches=[],
    )
    allocate = gpu_model_runner.GPUModelRunner.initialize_kv_cache_tensors
    of_v1 = allocate(v1, config, [TOKENS])
    v2: Any = SimpleNamespace(
        cache_config=cache,
        model_config=model,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    of_v2 = attn_utils.init_kv_cache({}, config, device, [TOKENS], v2)
    slots = slot_layout(pages=(PAGE, PAGE), groups=(((0, PAGE), (1, PAGE)),))
    maps = [
        bytemap.describe(
            caches, config, [0], slots, [caches[name].data_ptr() for name in ("l.0", "l.1")]
        )
        for caches in (of_v1, of_v2)
    ]
    assert maps[0] == maps[1] == map_of("LBHNC")


def with_backends(names: dict[str, tuple[str, str | None]]) -> Any:
    """A worker's configuration whose model has these layers, by backend and instruction set."""

    def layer(backend: str, instructions: str | None) -> Any:
        made = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
        if instructions is not None:
            made.isa = instructions
        return made

    context = {name: layer(*of) for name, of in names.items()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def test_the_backend_of_each_layer_and_a_processors_instructions_are_in_the_map() -> None:
    config = with_backends(
        {"l.1": ("CPU_ATTN", "amx"), "l.0": ("CPU_ATTN", "amx"), "m": ("MAMBA2_ATTN", None)}
    )
    assert bytemap.kernels(config, ["m", "l.1", "l.0", "unknown"]) == {
        "CPU_ATTN (amx)": ["l.0", "l.1"],
        "MAMBA2_ATTN": ["m"],
    }
    assert bytemap.kernels(SimpleNamespace(), ["l.0"]) == {}


def test_ranks_with_different_backends_do_not_agree() -> None:
    told = {
        rank: WorkerFacts.of(rank, {"groups": [], "kernels": {backend: ["l.0"]}})
        for rank, backend in enumerate(("FLASH_ATTN", "FLASHINFER"))
    }
    with pytest.raises(
        kvstrata.ConfigError, match="ranks 0 and 1 use different attention backends"
    ):
        handshake.agreed(told, 2)
