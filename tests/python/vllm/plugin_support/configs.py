"""Offloading configurations as vLLM would build them."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

PAGE = 4096


def disk_entry(url: str, **extra: Any) -> dict[str, Any]:
    return {
        "type": "kvstrata_disk",
        "url": url,
        "capacity": "64MiB",
        "model_identity": "test",
        **extra,
    }


def offloading_config(
    engine_id: str,
    tiers: list[dict[str, Any]],
    *,
    group_ids: tuple[int, ...] = (0,),
    bytes_per_block: int = 2 * PAGE,
    blocks_per_chunk: int = 1,
    world_size: int = 1,
    rank: int = 0,
    chunks: int = 8,
    events: bool = False,
    tokens_per_hash: int = 16,
    tokens_per_block: int = 16,
    extra: dict[str, Any] | None = None,
    **fields: Any,
) -> OffloadingConfig:
    row = -(-bytes_per_block * blocks_per_chunk * world_size // PAGE) * PAGE
    parallel = {
        "rank": rank,
        "world_size": world_size,
        "tp_size": world_size,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
        **fields.pop("parallel", {}),
    }
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=tokens_per_block,
                layer_names=(f"layer.{group_id}",),
                group_id=group_id,
            )
            for group_id in group_ids
        ),
        worker_kv_bytes_per_block=bytes_per_block,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": row * chunks,
            "secondary_tiers": tiers,
            **(extra or {}),
        },
        engine_id=engine_id,
        model=OffloadingModelConfig(name="test-model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(
            tokens_per_hash=tokens_per_hash, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=OffloadingParallelConfig(**parallel),
        **fields,
    )
