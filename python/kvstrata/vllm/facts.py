"""The facts that name a namespace, gathered from vLLM's configuration by a connector that sees it.

`OffloadingConfig`, all that a spec and a tier get, has no revision, overrides, quantisation, hash
algorithm or attention backend. :class:`kvstrata.vllm.connector.KVStrataConnector` therefore puts
:func:`gather`'s result under :data:`KEY` into the extra configuration, from where :func:`manifest`
reads it. Without it, only `model_identity` makes a manifest, and its byte map counts as unproved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.vllm import compat, modelconfig, weights

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

KEY = "kvstrata_facts"
VERSION = 1
# The order of bytes in a row that vLLM's worker and ours share: see kvstrata.memory.layout.
BYTE_MAP = "ranks, tensors, pages; version 1"
UNPROVED = "unproved"

FIXED_SEED_HASHES = frozenset({"sha256", "sha256_cbor"})


class PersistenceError(Exception):
    """Why nothing may be persisted. The message names the setting that changes it."""


def gather(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """All facts that vLLM's configuration holds about the meaning of KV bytes, as a JSON object.

    Never raises: what cannot be established is `None` under its name, and :func:`manifest` then
    refuses.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    full = modelconfig.relevant(model.hf_config)
    text = modelconfig.relevant(model.hf_text_config)
    by_length = modelconfig.depends_on_length(full) or modelconfig.depends_on_length(text)
    return {
        "version": VERSION,
        "model": _model_name(model.model),
        "revision": getattr(model, "revision", None),
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "weights": weights.identify(model, vllm_config.load_config),
        "config": {
            "deny_list": modelconfig.DENY_VERSION,
            "digest": modelconfig.digest({"full": full, "text": text}),
            "architecture": list(getattr(model.hf_config, "architectures", None) or []),
            "hf_overrides": modelconfig.digest(modelconfig.plain(model.hf_overrides)),
            "max_model_len": model.max_model_len if by_length else "any",
            "dtype": _dtype_name(model.dtype),
            "quantization": _text(getattr(model, "quantization", None)),
        },
        "draft": _draft(vllm_config),
        "cache": {
            "dtype": cache_dtype(cache.cache_dtype, model.dtype),
            "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
            "skip_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
            "layout": _text(getattr(cache, "kv_cache_layout", None)),
            "tensors": _tensors(kv_cache_config),
        },
        "hash": hash_identity(str(cache.prefix_caching_hash_algo), os.environ),
        "attention": _attention(vllm_config),
        "groups": [
            _group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ],
    }


def manifest(spec: OffloadingSpec, model_identity: str | dict[str, Any] | None) -> dict[str, Any]:
    """The identity part of a namespace's manifest for a tier below a spec's manager.

    # Errors
    :class:`PersistenceError` where the facts do not suffice to persist anything safely.
    """
    facts = spec.extra_config.get(KEY)
    known = _facts_or_none(facts)
    if known is not None and known["hash"]["seed"] is None:
        msg = (
            f"block hashes of prefix_caching_hash_algo={known['hash']['algorithm']} have a random "
            "seed, so no row would ever be found again: set PYTHONHASHSEED, or use "
            "prefix_caching_hash_algo=sha256"
        )
        raise PersistenceError(msg)
    if known is None and model_identity is None:
        msg = (
            "this connector does not say which weights, revision and overrides the KV bytes belong "
            "to: set 'model_identity' in the tier entry, or use kv_connector=KVStrataConnector"
        )
        raise PersistenceError(msg)
    if known is not None and model_identity is None and not _weights_known(known):
        msg = (
            "the identity of the weights could not be established (no local files, no resolved "
            "commit, or a loader that does not read checkpoint files): set 'model_identity' in the "
            "tier entry"
        )
        raise PersistenceError(msg)
    config = spec.config
    fields: dict[str, Any] = {
        "model": known["model"] if known is not None else _model_name(config.model.name),
        "engine": "vllm",
        "engine_release": compat.release_name(),
        "byte_order": sys.byteorder,
        "byte_map": BYTE_MAP if known is not None else UNPROVED,
        "model_identity": model_identity,
        "facts": known,
        **_geometry(spec),
    }
    if known is None:
        fields["python_hash_seed"] = _seed_digest(os.environ.get("PYTHONHASHSEED"))
        fields["cache_dtype"] = normal_cache_dtype(config.model.dtype)
    return fields


def _geometry(spec: OffloadingSpec) -> dict[str, Any]:
    """What an offloading spec itself knows about the rows: sizes, groups, ranks."""
    config = spec.config
    parallel = config.parallel
    return {
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "bytes_per_block_and_rank": config.worker_kv_bytes_per_block,
        "kv_cache_layout": config.kv_cache_layout,
        "canonical_layout": config.canonical_layout,
        "replicated_layout": bool(spec.replicated_layout),
        "parallel": {
            "world_size": parallel.world_size,
            "tensor": parallel.tp_size,
            "pipeline": parallel.pp_size,
            "prefill_context": parallel.pcp_size,
            "decode_context": parallel.dcp_size,
            "agnostic": parallel.is_parallelism_agnostic,
        },
        "kv_groups": [
            {
                "id": group.group_id,
                "tokens_per_block": group.tokens_per_block,
                "layers": list(group.layer_names),
            }
            for group in config.groups
        ],
    }


def hash_identity(algorithm: str, environ: os._Environ[str] | dict[str, str]) -> dict[str, Any]:
    """Algorithm and seed of vLLM's block hashes; `None` where each process draws its own seed.

    Derived from the settings: vLLM's own record of the seed is not filled in yet when a scheduler
    is built.
    """
    seed = environ.get("PYTHONHASHSEED")
    if seed is not None:
        named = _seed_digest(seed)
    else:
        named = "vllm's default" if algorithm in FIXED_SEED_HASHES else None
    return {"algorithm": algorithm, "seed": named}


def cache_dtype(configured: object, model_dtype: object) -> str:
    """The effective element type of the KV cache: `auto` is the model's own."""
    return normal_cache_dtype(
        _dtype_name(model_dtype) if str(configured) == "auto" else str(configured)
    )


def normal_cache_dtype(name: str) -> str:
    """One name for what vLLM spells in two ways, depending on the process that is asked.

    A worker rewrites `fp8` to `fp8_ds_mla` in its own configuration. The groups' specs tell the two
    layouts apart.
    """
    return "fp8" if name in {"fp8", "fp8_e4m3", "fp8_ds_mla"} else name


def _weights_known(facts: dict[str, Any]) -> bool:
    draft = facts["draft"] or {}
    return facts["weights"] is not None and draft.get("weights", "none") is not None


def _facts_or_none(facts: object) -> dict[str, Any] | None:
    return facts if isinstance(facts, dict) and facts.get("version") == VERSION else None


def _seed_digest(seed: str | None) -> str | None:
    # The seed keeps hashes secret for some algorithms, so only its digest is written down.
    return None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16]


def _model_name(model: str) -> str:
    """The last part of a directory, so that a moved model keeps its rows; a hub name as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: object) -> str | None:
    return None if value is None else str(getattr(value, "name", None) or value)


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
    from vllm.platforms import current_platform

    config = getattr(vllm_config, "attention_config", None)
    backend = _text(getattr(config, "backend", None))
    per_kind = getattr(config, "backend_per_kind", None) or {}
    device: str | None = None
    if backend is None:
        try:
            device = str(current_platform.get_device_name())
        except Exception:  # noqa: BLE001 -- a platform that cannot tell its name
            device = None
    return {
        "backend": backend,
        "per_kind": {str(kind): _text(item) for kind, item in sorted(per_kind.items())},
        "platform": str(current_platform.device_type),
        "device": device,
    }


def _draft(vllm_config: Any) -> dict[str, Any] | None:
    """A draft model's layers are among the groups, so its weights are part of the identity."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    method = _text(getattr(speculative, "method", None))
    if draft is None:
        return {"method": method}
    return {
        "method": method,
        "model": _model_name(draft.model),
        "weights": weights.identify(draft, vllm_config.load_config),
        "config": modelconfig.digest(modelconfig.relevant(draft.hf_config)),
    }
