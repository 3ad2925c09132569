"""The facts that name a namespace, gathered from vLLM's configuration by a connector that sees it.

`OffloadingConfig`, all that a spec and a tier get, has no revision, overrides, quantisation, hash
algorithm or attention backend. :class:`kvstrata.vllm.connector.KVStrataConnector` therefore puts
:func:`gather`'s result under :data:`KEY` into the extra configuration, from where
:mod:`kvstrata.vllm.manifest` reads it. docs/NAMESPACE.md says of each fact why it is there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvstrata.vllm import modelconfig, settings, weights

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "kvstrata_facts"
VERSION = 3

FIXED_SEED_HASHES = frozenset({"sha256", "sha256_cbor"})
# The one kind whose pages vLLM keeps as equal copies on every tensor-parallel rank.
REPLICATED_KIND = "MLAAttentionSpec"


def gather(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """All facts that vLLM's configuration holds about the meaning of KV bytes, as a JSON object.

    What cannot be established is `None` under its name, and the manifest is then refused.

    # Errors
    `OSError` and the like, where weight files cannot be read.
    """
    model = vllm_config.model_config
    options = _options(vllm_config)
    config = modelconfig.fields(model)
    by_length = any(modelconfig.depends_on_length(part) for part in config.values())
    commit = weights.commit_of(model)
    return {
        "version": VERSION,
        "model": model_name(model.model),
        "revision": commit or getattr(model, "revision", None),
        "weights": weights.identify(
            model, vllm_config.load_config, options, ranks=_ranks(vllm_config.parallel_config)
        ),
        "files": weights.beside(model, vllm_config.load_config),
        "config": {"list": modelconfig.DENY_VERSION, **config},
        "overrides": modelconfig.plain(getattr(model, "hf_overrides", None) or {}),
        "max_model_len": model.max_model_len if by_length else "any",
        "dtype": dtype_name(model.dtype),
        "quantization": _text(getattr(model, "quantization", None)),
        "settings": settings.of_model(model),
        "media": settings.of_media(model),
        "draft": _draft(vllm_config, options),
        "adapters": _adapters(vllm_config, options),
        "cache": _cache(vllm_config),
        "tensors": _tensors(kv_cache_config),
        "hash": hash_identity(str(vllm_config.cache_config.prefix_caching_hash_algo), os.environ),
        "attention": _attention(vllm_config),
        "state_spaces": settings.of_state_spaces(vllm_config),
        "environment": settings.of_environment(),
        "platform_options": settings.of_platform(vllm_config),
        "groups": [
            _group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ],
        "parallel": _parallel(vllm_config, kv_cache_config),
        "build": _build(vllm_config),
    }


def known(facts: object) -> dict[str, Any] | None:
    """Facts of this version, or `None`."""
    return facts if isinstance(facts, dict) and facts.get("version") == VERSION else None


def hash_identity(algorithm: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Algorithm and seed of vLLM's block hashes; `None` where each process draws its own seed.

    Derived from the settings: vLLM's own record of the seed is not filled in yet when a scheduler
    is built.
    """
    seed = environ.get("PYTHONHASHSEED")
    if seed is not None:
        named = seed_digest(seed)
    else:
        named = "vllm's default" if algorithm in FIXED_SEED_HASHES else None
    return {"algorithm": algorithm, "seed": named}


def seed_digest(seed: str | None) -> str | None:
    """A name of the hash seed: it keeps hashes secret for some algorithms, so not itself."""
    return None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:32]


def cache_dtype(configured: object, model_dtype: object) -> str:
    """The effective element type of the KV cache: `auto` is the model's own."""
    return normal_cache_dtype(
        dtype_name(model_dtype) if str(configured) == "auto" else str(configured)
    )


def normal_cache_dtype(name: str) -> str:
    """One name for what vLLM spells in two ways, depending on the process that is asked.

    A worker rewrites `fp8` to `fp8_ds_mla` in its own configuration. The groups' specs tell the two
    layouts apart.
    """
    return "fp8" if name in {"fp8", "fp8_e4m3", "fp8_ds_mla"} else name


def model_name(model: str) -> str:
    """The last part of a directory, so that a moved model keeps its rows; a hub name as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def dtype_name(dtype: object) -> str:
    """A torch dtype without its module."""
    return str(dtype).removeprefix("torch.")


def _options(vllm_config: Any) -> dict[str, Any]:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_extra_config", None) or {}


def _text(value: object) -> str | None:
    return None if value is None else str(getattr(value, "name", None) or value)


def _cache(vllm_config: Any) -> dict[str, Any]:
    cache = vllm_config.cache_config
    return {
        "dtype": cache_dtype(cache.cache_dtype, vllm_config.model_config.dtype),
        "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "skip_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
        "mamba_cache_dtype": _text(getattr(cache, "mamba_cache_dtype", None)),
        "mamba_ssm_cache_dtype": _text(getattr(cache, "mamba_ssm_cache_dtype", None)),
        "layout": _text(getattr(cache, "kv_cache_layout", None)),
    }


def _group(index: int, group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    described = (
        {name: _describe(item) for name, item in per_layer.items()}
        if isinstance(per_layer, dict)
        else _describe(spec)
    )
    return {"id": index, "layers": list(group.layer_names), "spec": described}


def _describe(spec: Any) -> dict[str, Any]:
    fields = {
        field.name: modelconfig.plain(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name != "kv_cache_specs"
    }
    return {"kind": type(spec).__name__, "page_bytes": int(spec.page_size_bytes), **fields}


def _tensors(kv_cache_config: Any) -> list[dict[str, Any]]:
    """Where layers lie relative to each other within a block.

    Only a layout with the block outermost packs layers into one block; in the others strides and
    offsets between layers depend on the number of blocks, and a block's bytes do not depend on
    them.
    """
    packed = str(getattr(kv_cache_config, "kv_cache_layout", None) or "").startswith("B")
    return [
        {
            "layers": list(tensor.layers),
            "block_stride": int(tensor.block_stride),
            "layer_stride": int(tensor.layer_stride) if packed else None,
            "offset": int(tensor.offset) if packed else None,
        }
        for tensor in kv_cache_config.kv_cache_tensors
    ]


def _attention(vllm_config: Any) -> dict[str, Any]:
    """The attention backend; where vLLM picks it by itself, the device it picks it for."""
    config = getattr(vllm_config, "attention_config", None)
    backend = _text(getattr(config, "backend", None))
    per_kind = getattr(config, "backend_per_kind", None) or {}
    found = device_facts()
    return {
        **found,
        "backend": backend,
        "per_kind": {str(kind): _text(item) for kind, item in sorted(per_kind.items())},
        "device": found["device"] if backend is None else None,
        "settings": settings.of_attention(vllm_config),
    }


def device_facts() -> dict[str, Any]:
    """The device that attention runs on, as far as backends and kernels are chosen by it."""
    from vllm.platforms import current_platform

    device: str | None
    try:
        device = str(current_platform.get_device_name())
    except Exception:  # noqa: BLE001 -- a platform that cannot tell its name
        device = None
    return {
        "platform": str(current_platform.device_type),
        "device": device,
        "hardware": settings.of_hardware(),
    }


def _adapters(vllm_config: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether adapters may be used, and how they are told apart; which one is in each key."""
    config = getattr(vllm_config, "lora_config", None)
    if config is None:
        return None
    return {
        "policy": options.get("persist_lora", "name"),
        "dtype": _text(config.lora_dtype),
        **settings.of_adapters(config),
    }


def _draft(vllm_config: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """A draft model's layers are among the groups, so its weights are part of the identity."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    method = _text(getattr(speculative, "method", None))
    if draft is None:
        return {"method": method}
    sampling = {key: options[key] for key in (weights.SAMPLING_OPTION,) if key in options}
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    ranks = _ranks(getattr(speculative, "draft_parallel_config", None))
    return {
        "method": method,
        "model": model_name(draft.model),
        "weights": weights.identify(draft, load, sampling, ranks=ranks),
        "files": weights.beside(draft, load),
        "config": modelconfig.digest(modelconfig.relevant(draft.hf_config)),
        "dtype": dtype_name(getattr(draft, "dtype", None)),
        "quantization": _text(getattr(draft, "quantization", None)),
        "settings": settings.of_model(draft),
    }


def _ranks(parallel_config: Any) -> int:
    return int(getattr(parallel_config, "world_size", None) or 1)


def _parallel(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What `OffloadingConfig` does not say about the ranks."""
    config = vllm_config.parallel_config
    stages = int(getattr(config, "pipeline_parallel_size", 1))
    kinds = {
        type(spec).__name__
        for group in kv_cache_config.kv_cache_groups
        for spec in _layer_specs(group.kv_cache_spec)
    }
    return {
        "pipeline_split": _pipeline_split(vllm_config, stages) if stages > 1 else None,
        "interleave": int(getattr(config, "cp_kv_cache_interleave_size", 1)),
        "replicated_pages": kinds == {REPLICATED_KIND},
    }


def _layer_specs(spec: Any) -> list[Any]:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if isinstance(per_layer, dict) else [spec]


def _pipeline_split(vllm_config: Any, stages: int) -> list[list[int]]:
    """First and last layer (exclusive) of every stage, by vLLM's own rule."""
    from vllm.distributed.utils import get_pp_indices

    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return [list(get_pp_indices(layers, stage, stages)) for stage in range(stages)]


def _build(vllm_config: Any) -> dict[str, Any]:
    """What decides about the bytes where nobody has seen them: the exact release and runner."""
    return {
        "version": str(vllm.__version__),
        "runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
    }
