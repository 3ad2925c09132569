"""What the connector makes of its configuration when it starts, in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.logger import init_logger

import kvstrata
from kvstrata.vllm import exact, facts, geometry, plugin, stackconfig, windows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


def choose_spec(vllm_config: VllmConfig) -> dict[str, Any]:
    """Set our spec where none is named; return the extra configuration, which the spec shares."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        msg = "KVStrataConnector without a kv_transfer_config"
        raise kvstrata.ConfigError(msg)
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    if not extra.get("spec_name"):
        extra["spec_name"] = plugin.SPEC
        extra["spec_module_path"] = plugin.SPEC_MODULE
    elif extra["spec_name"] == plugin.SPEC:
        extra.setdefault("spec_module_path", plugin.SPEC_MODULE)
    return extra


def name_metrics(vllm_config: VllmConfig) -> None:
    """Set what the spec needs to know to declare its metrics, in the API server's process."""
    extra = choose_spec(vllm_config)
    if extra["spec_name"] == plugin.SPEC:
        extra[exact.KEY] = stackconfig.slots_of(extra)


def settle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: dict[str, Any]) -> None:
    """Read the options, and put what they come to where the spec and vLLM look for it."""
    found = stackconfig.parse(extra)
    exact.check_tiers(found)
    extra["cpu_bytes_to_use"] = found.cpu_bytes
    extra["offload_prompt_only"] = found.offload_prompt_only
    extra[exact.KEY] = found.slots
    extra[exact.MAX_TOKENS_KEY] = int(vllm_config.model_config.max_model_len)
    heads = None
    if extra.get("canonical_layout"):
        heads = int(vllm_config.model_config.get_total_num_kv_heads())
    geometry.put(extra, kv_cache_config, heads)


def gather(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any] | None:
    """Collect the facts about this model; `None`, and an error is logged, where that fails."""
    try:
        return facts.gather(vllm_config, kv_cache_config)
    except Exception:
        logger.exception(
            "kvstrata: the facts about this model could not be gathered; "
            "nothing is persisted unless 'model_identity' is set in the tier entry"
        )
        return None


def refuse_unsupported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: dict[str, Any]
) -> None:
    """Refuse what cannot work.

    # Errors
    :class:`kvstrata.ConfigError` saying what.
    """
    nodes = int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1))
    if nodes > 1:
        msg = (
            f"kvstrata: one engine over {nodes} nodes is not supported, its ranks do not share "
            "memory: use tensor or pipeline parallelism within one node"
        )
        raise kvstrata.ConfigError(msg)
    notices_holes = (
        extra["spec_name"] == plugin.SPEC and stackconfig.slots_of(extra) == stackconfig.EXACT
    )
    if _several_blocks_per_chunk(extra) and not notices_holes:
        bounded = windows.of_config(kv_cache_config, get_offloading_group_ids(kv_cache_config))
        if bounded:
            raise kvstrata.ConfigError(windows.refusal(bounded))


def _several_blocks_per_chunk(extra: dict[str, Any]) -> bool:
    return extra.get("block_size") is not None or int(extra.get("blocks_per_chunk") or 1) > 1
