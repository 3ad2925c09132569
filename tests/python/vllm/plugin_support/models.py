"""vLLM's configurations as far as the facts read them, and a model's directory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from pathlib import Path


class Config:
    """A transformers configuration as far as the facts read one."""

    def __init__(self, **fields: Any) -> None:
        self.architectures = ["LlamaForCausalLM"]
        self.fields = fields
        self._commit_hash = fields.get("_commit_hash")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


def vllm_config(
    model_dir: Path,
    *,
    hf: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    **over: Any,
) -> Any:
    hf_config = Config(hidden_size=128, rope_theta=1e4, **(hf or {}))
    model = {
        "model": str(model_dir),
        "model_weights": "",
        "revision": None,
        "hf_config": hf_config,
        "hf_text_config": hf_config,
        "hf_overrides": {},
        "max_model_len": 2048,
        "dtype": torch.bfloat16,
        "quantization": None,
        "seed": 0,
        **over.pop("model", {}),
    }
    cache = {
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
        "kv_cache_layout": "LBHNC",
        "calculate_kv_scales": False,
        "kv_cache_dtype_skip_layers": [],
        **over.pop("cache", {}),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(load_format=over.pop("load_format", "auto")),
        speculative_config=over.pop("speculative", None),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        parallel_config=SimpleNamespace(
            nnodes_within_dp=over.pop("nodes", 1),
            world_size=1,
            rank=0,
            pipeline_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        lora_config=over.pop("lora", None),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStrataConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra or {},
        ),
    )


def kv_cache_config(*, window: int | None = None) -> KVCacheConfig:
    common: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    groups = [KVCacheGroupSpec(["l.0"], FullAttentionSpec(**common))]
    if window is not None:
        groups.append(KVCacheGroupSpec(["l.1"], SlidingWindowSpec(**common, sliding_window=window)))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def make_model(path: Path) -> Path:
    """Writes a model's directory: one weight file, and a text that is none."""
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      " + b"w" * 100)
    (path / "README.md").write_text("a model")
    return path
