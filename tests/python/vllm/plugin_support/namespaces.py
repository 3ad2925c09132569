"""A namespace's manifest from start to end: vLLM's configuration in, a directory at a root out."""

from __future__ import annotations

import copy
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata.vllm import facts, manifest
from plugin_support.configs import PAGE, offloading_config
from plugin_support.models import kv_cache_config, vllm_config

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.kv_cache_interface import KVCacheConfig

BYTE_MAP: dict[str, Any] = {
    "version": 1,
    "order": "ranks, tensors, blocks",
    "rank_bytes": 2 * PAGE,
    "groups": [
        {
            "id": 0,
            "bytes_per_block": 2 * PAGE,
            "block_stride": [2 * PAGE],
            "bytes": [2 * PAGE],
            "layers": [[0, 0]],
            "pages": [{"dtype": "bfloat16", "shape": [2, 16, 64], "strides": [2048, 128, 2]}],
        }
    ],
}
HF = {
    "hidden_act": "silu",
    "head_dim": 32,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": 64,
    "quantization_config": {"bits": 8},
    "rope_scaling": {"rope_type": "linear", "factor": 1.0},
}


def set_at(value: Any, path: str, new: Any) -> Any:
    """A copy of nested dicts and lists with one leaf replaced; the leaf has to be there."""
    made = copy.deepcopy(value)
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place = made
    for part in way:
        place = place[part]
    if isinstance(place, dict) and last not in place:
        raise KeyError(path)
    place[last] = new
    return made


def identity(model_dir: Path, **case: Any) -> dict[str, Any]:
    """The identity fields for a configuration; see :func:`described`."""
    return described(model_dir, **case)[1]


def described(
    model_dir: Path,
    *,
    vllm: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    groups: KVCacheConfig | None = None,
    extra: dict[str, Any] | None = None,
    fact: tuple[str, Any] | None = None,
    byte_map: dict[str, Any] | None = BYTE_MAP,
    model_identity: str | None = None,
    replicated: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """A spec's double and its identity fields; `fact` replaces one gathered fact."""
    over = copy.deepcopy(vllm or {})
    hf = {**HF, **over.pop("hf", {})}
    cache = {"cache_dtype": "fp8", **over.pop("cache", {})}
    config = vllm_config(model_dir, hf=hf, cache=cache, extra=extra, **over)
    gathered = facts.gather(config, groups or kv_cache_config(window=64))
    if fact is not None:
        gathered = set_at(gathered, *fact)
    made = offloading_config(
        f"engine-{uuid.uuid4().hex}",
        [],
        extra={**(extra or {}), facts.KEY: gathered},
        **(spec or {}),
    )
    double: Any = SimpleNamespace(
        config=made, extra_config=made.extra_config, replicated_layout=replicated
    )
    return double, manifest.build(double, model_identity, byte_map)


def make_namespace(
    root: Path, fields: dict[str, Any], row_bytes: int = 2 * PAGE, **options: Any
) -> Path:
    """The directory of these fields, made by a tier that opens it where it is not there."""
    for found in root.iterdir():
        if found.name.endswith(_digits(fields, row_bytes)) and not options:
            return found
    chosen = {"capacity": "8MiB", "min_free": 0, **options}
    with kvstrata.open_tier(
        root, manifest=fields, row_bytes=row_bytes, arena=bytearray(row_bytes), **chosen
    ):
        pass
    digits = _digits(fields, row_bytes)
    (made,) = (path for path in root.iterdir() if path.name.endswith(digits))
    return made


def _digits(fields: dict[str, Any], row_bytes: int) -> str:
    """The end of the directory's name, from what docs/FORMAT.md says the core adds."""
    whole = {
        **fields,
        "format_version": 1,
        "row_bytes": {"0": row_bytes},
        "checksum": "crc64nvme",
        "endianness": "little",
    }
    return kvstrata.manifest_digest(whole)[:32]
