"""What else changes the bytes of a KV block: settings, environment and instruction set.

Settings are taken by deny lists, as in :mod:`kvstrata.vllm.modelconfig`: one nobody thought of
separates namespaces rather than mixing them.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from pathlib import Path
from typing import Any

import torch

from kvstrata.vllm import digests, modelconfig

# How a model is built from its configuration and its files.
_OF_MODEL = (
    "code_revision",
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "quantization_config",
)
# Of attention: what is a fact by itself, and what only schedules the same arithmetic.
_NOT_OF_ATTENTION = frozenset(
    {
        "backend",
        "backend_per_kind",
        "flash_attn_max_num_splits_for_cuda_graph",
        "indexer_tp_shard_min_rows",
        "sparse_mla_prefill_workspace_factor",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
    }
)
# Of images, sounds and videos: caches, transport and limits.
_NOT_OF_MEDIA = frozenset(
    {
        "allow_missing_mm_embeddings",
        "enable_mm_embeds",
        "interleave_mm_strings",
        "language_model_only",
        "limit_per_prompt",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)
# Of adapters: how many there is room for.
_NOT_OF_ADAPTERS = frozenset(
    {
        "default_mm_loras",
        "fully_sharded_loras",
        "lora_dtype",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "specialize_active_lora",
    }
)
# vLLM's variables with one of these in their names choose layouts, kernels and precisions.
_ENVIRONMENT = re.compile(
    r"AITER|ATTN|BF16|DISABLED_KERNELS|DTYPE|E8M0|F16|FP4|FP8|HUMMING|INT4|INT8|LAYOUT|MARLIN|MLA"
    r"|MODELSCOPE|PRECISION|QUANT|ROPE|SIMULATION|WNA16"
)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# Resolved by vLLM into a setting that is a fact by itself, or free of consequences.
_NOT_OF_ENVIRONMENT = frozenset(
    {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "VLLM_KV_CACHE_LAYOUT"}
)


def of_model(model_config: Any) -> dict[str, Any]:
    """How the model is built, beyond its configuration file."""
    return {name: modelconfig.plain(getattr(model_config, name, None)) for name in _OF_MODEL}


def of_media(model_config: Any) -> dict[str, Any] | None:
    """How images, sounds and videos are processed; `None` for a model of text.

    vLLM's hash of an item is of what a request brings. What the server adds to it, such as the
    processor's default arguments, is in no key.
    """
    config = getattr(model_config, "multimodal_config", None)
    if config is None:
        return None
    scales = getattr(config, "mm_encoder_fp8_scale_path", None)
    return {
        **_fields(config, _NOT_OF_MEDIA),
        "mm_encoder_fp8_scales": digests.file_digest(Path(scales)) if scales else None,
    }


def of_attention(vllm_config: Any) -> dict[str, Any]:
    """Settings of attention but for the backend."""
    return _fields(getattr(vllm_config, "attention_config", None), _NOT_OF_ATTENTION)


def of_adapters(lora_config: Any) -> dict[str, Any]:
    """Which parts of a model an adapter changes."""
    return _fields(lora_config, _NOT_OF_ADAPTERS)


def of_state_spaces(vllm_config: Any) -> dict[str, Any]:
    """Settings of Mamba layers."""
    return _fields(getattr(vllm_config, "mamba_config", None), frozenset())


def of_platform(vllm_config: Any) -> str | None:
    """A digest of the options that only a platform's plug-in understands."""
    options = getattr(vllm_config, "additional_config", None)
    return modelconfig.digest(modelconfig.plain(options)) if options else None


def of_environment() -> dict[str, Any]:
    """Effective values of vLLM's environment variables that may change KV bytes."""
    from vllm import envs

    found = {}
    for name, read in sorted(envs.environment_variables.items()):
        if _ENVIRONMENT.search(name) and name not in _NOT_OF_ENVIRONMENT:
            found[name] = modelconfig.plain(read())
    return found


def runner_asked() -> dict[str, Any]:
    """The variable that chooses between the runners, for whoever cannot see which one runs."""
    from vllm import envs

    return {RUNNER: modelconfig.plain(envs.environment_variables[RUNNER]())}


def of_hardware() -> dict[str, Any]:
    """What kernels are chosen by, whichever backend is set.

    vLLM's CPU kernels order keys and values by instruction set within a block of one shape, and the
    8-bit floating-point format is the device's.
    """
    from vllm.platforms import current_platform

    if str(current_platform.device_type) == "cpu":
        return {
            "machine": platform.machine(),
            "amx": _told(lambda: bool(torch.cpu._is_amx_tile_supported())),  # noqa: SLF001
            "avx512": _told(lambda: bool(torch.cpu._is_avx512_supported())),  # noqa: SLF001
            "vectors": _told(torch.backends.cpu.get_cpu_capability),
        }
    return {
        "capability": _told(lambda: str(current_platform.get_device_capability())),
        "fp8": _told(lambda: str(current_platform.fp8_dtype())),
    }


def _told(ask: Any) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001 -- a platform that cannot tell
        return None


def _fields(config: Any, without: frozenset[str]) -> dict[str, Any]:
    if config is None:
        return {}
    if dataclasses.is_dataclass(config):
        names = [field.name for field in dataclasses.fields(config)]
    else:
        names = list(vars(config))
    return {
        name: modelconfig.plain(getattr(config, name, None))
        for name in sorted(names)
        if name not in without and not name.startswith("_")
    }
