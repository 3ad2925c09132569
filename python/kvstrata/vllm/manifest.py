"""The identity part of a namespace's manifest, one named field per fact; see docs/NAMESPACE.md.

Three ways, never shared with each other:

* *proven*: :class:`kvstrata.vllm.connector.KVStrataConnector` and our own worker. The worker
  derived the byte map from its tensors, and every rank agreed to it
  (:mod:`kvstrata.vllm.handshake`).
* *unproved* facts: the same connector with vLLM's own worker. Nobody has seen the bytes, so that
  the exact release, platform and runner stand in for them.
* *named*: any other connector. Only `model_identity` says what the bytes belong to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata.vllm import bytemap, compat, facts, settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

UNPROVED = "unproved"
# In a tier's extra configuration: the byte map every rank agreed to. In a connector's: the identity
# that tiers of vLLM's get, which take no such option themselves.
BYTE_MAP_KEY = "kvstrata_byte_map"
IDENTITY_OPTION = "model_identity"
# Of a group's specification, what a canonical row does not depend on.
_OF_ONE_RANK = frozenset({"num_kv_heads", "page_bytes"})
_PLACED_ELSEWHERE = frozenset({"version", "model", "build", "tensors", "parallel"})
TENANT_OPTION = "tenant"


class PersistenceError(Exception):
    """Why nothing may be persisted. The message names the setting that changes it."""


def build(
    spec: OffloadingSpec,
    model_identity: str | dict[str, Any] | None,
    byte_map: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The identity fields for a tier below `spec`'s manager; `byte_map` where it is proven.

    # Errors
    :class:`PersistenceError` where the facts do not suffice to persist anything safely;
    :class:`kvstrata.ConfigError` where what was configured can never find a row again.
    """
    known = facts.known(spec.extra_config.get(facts.KEY))
    require_reproducible(known)
    _require_identity(known, model_identity)
    fields: dict[str, Any] = {
        "model": known["model"] if known else facts.model_name(spec.config.model.name),
        "model_identity": model_identity,
        TENANT_OPTION: tenant_of(spec.extra_config),
        "engine": {"name": "vllm", "release": compat.release_name()},
        "byte_map": byte_map or UNPROVED,
        **_geometry(spec, byte_map),
    }
    if known is None:
        fields["engine"] |= {"version": compat.version()}
        fields |= _bare(spec)
        return fields
    fields |= {key: known[key] for key in known if key not in _PLACED_ELSEWHERE}
    fields["facts_version"] = known["version"]
    if bytemap.is_canonical(byte_map):
        fields["groups"] = [_of_all_ranks(group) for group in known["groups"]]
    fields["parallel"] = {**_ranks(spec, known, byte_map), **_stages(known)}
    if byte_map is None:
        fields["engine"] |= known["build"]
        fields["tensors"] = known["tensors"]
    return fields


def require_reproducible(known: dict[str, Any] | None) -> None:
    """Refuse block hashes that no other process will ever compute again.

    # Errors
    :class:`kvstrata.ConfigError` naming the settings.
    """
    if known is not None and known["hash"]["seed"] is None:
        msg = (
            f"block hashes of prefix_caching_hash_algo={known['hash']['algorithm']} have a random "
            "seed, so no persisted row would ever be found again: set PYTHONHASHSEED, or use "
            "prefix_caching_hash_algo=sha256"
        )
        raise kvstrata.ConfigError(msg)


def tenant_of(extra_config: dict[str, Any]) -> str | None:
    """The tenant this engine serves, from ``kv_connector_extra_config``.

    # Errors
    :class:`kvstrata.ConfigError` for anything but a text.
    """
    tenant = extra_config.get(TENANT_OPTION)
    if tenant is None or (isinstance(tenant, str) and tenant.strip()):
        return tenant
    msg = f"{TENANT_OPTION!r} is {tenant!r}, not a text that names the tenant"
    raise kvstrata.ConfigError(msg)


def _require_identity(
    known: dict[str, Any] | None, model_identity: str | dict[str, Any] | None
) -> None:
    if model_identity is not None:
        return
    if known is None:
        msg = (
            "this connector does not say which weights, revision and overrides the KV bytes belong "
            "to: set 'model_identity' in the tier entry, or use kv_connector=KVStrataConnector"
        )
        raise PersistenceError(msg)
    draft = known["draft"] or {}
    if known["weights"] is None or draft.get("weights", "none") is None:
        msg = (
            "the identity of the weights could not be established (no local files, no resolved "
            "commit, or a loader that does not read checkpoint files): set 'model_identity' in the "
            "tier entry"
        )
        raise PersistenceError(msg)


def row_bytes(byte_map: dict[str, Any] | None, slot_bytes: int, ranks: int = 1) -> int:
    """Bytes of a slot of one size for all groups that make its row.

    All of them, or the part that no rank's size changes; with one group, what its `ranks` ranks
    fill: the row it has in a slot that fits it, too.
    """
    if not byte_map:
        return slot_bytes
    if bytemap.is_canonical(byte_map):
        return int(byte_map["rank_bytes"])
    if len(byte_map["groups"]) == 1:
        return min(slot_bytes, ranks * int(byte_map["rank_bytes"]))
    return slot_bytes


def _of_all_ranks(group: dict[str, Any]) -> dict[str, Any]:
    """A group's facts without what counts one rank's heads; the byte map has those of all."""
    spec = group["spec"]
    if "kind" not in spec:  # one specification per layer
        return {**group, "spec": {layer: _without_heads(item) for layer, item in spec.items()}}
    return {**group, "spec": _without_heads(spec)}


def _without_heads(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in spec.items() if key not in _OF_ONE_RANK}


def _geometry(spec: OffloadingSpec, byte_map: dict[str, Any] | None) -> dict[str, Any]:
    """What an offloading spec itself knows about the rows."""
    config = spec.config
    is_canonical = bytemap.is_canonical(byte_map)
    return {
        "tokens_per_hash": config.cache.tokens_per_hash,
        "tokens_per_block": {
            str(group.group_id): group.tokens_per_block for group in config.groups
        },
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "bytes_per_block_and_rank": None if is_canonical else config.worker_kv_bytes_per_block,
        "canonical_layout": config.canonical_layout,
    }


def _bare(spec: OffloadingSpec) -> dict[str, Any]:
    """What a spec knows of the rest, where no connector of ours gathered facts."""
    config = spec.config
    return {
        "cache": {
            "dtype": facts.normal_cache_dtype(config.model.dtype),
            "layout": config.kv_cache_layout,
        },
        "hash": {"seed": facts.seed_digest(os.environ.get("PYTHONHASHSEED"))},
        "attention": facts.device_facts(),
        "environment": {**settings.of_environment(), **settings.runner_asked()},
        "groups": [
            {"id": group.group_id, "layers": list(group.layer_names)} for group in config.groups
        ],
        "parallel": _ranks(spec, None, None),
    }


def _ranks(
    spec: OffloadingSpec, known: dict[str, Any] | None, byte_map: dict[str, Any] | None
) -> dict[str, Any]:
    """Whose bytes a row holds.

    Ranks are left out only where a row certainly holds the same bytes for any number of them, under
    a proven byte map: canonical pages, or one copy of latent pages that every tensor-parallel rank
    keeps alike.
    """
    parallel = spec.config.parallel
    if known is not None and bytemap.is_canonical(byte_map):
        return {"portable": True, "row": "canonical pages"}
    if known is not None and byte_map is not None and is_single_copy(spec, known):
        return {"portable": True, "row": "one copy of replicated pages"}
    return {
        "portable": False,
        "row": "one copy of replicated pages" if spec.replicated_layout else "all ranks",
        "world_size": parallel.world_size,
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "prefill_context": parallel.pcp_size,
        "decode_context": parallel.dcp_size,
    }


def is_single_copy(spec: OffloadingSpec, known: dict[str, Any]) -> bool:
    """Whether a row holds exactly one copy of pages that all tensor-parallel ranks share."""
    parallel = spec.config.parallel
    others = (parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    if not known["parallel"]["replicated_pages"] or any(size != 1 for size in others):
        return False
    return bool(spec.replicated_layout) or parallel.world_size == 1


def _stages(known: dict[str, Any]) -> dict[str, Any]:
    parallel = known["parallel"]
    return {
        "pipeline_split": parallel["pipeline_split"],
        "interleave": parallel["interleave"],
    }
