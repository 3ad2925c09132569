"""vLLM's offloading connector, plus the facts that a namespace needs and a spec of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import iter_layer_specs

import kvstrata
from kvstrata.vllm import compat, facts, packed, plugin

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# Groups of these kinds look back without a bound. All others drop blocks that have left their
# window.
_UNBOUNDED_KINDS = frozenset(
    {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec"}
)


class KVStrataConnector(OffloadingConnector):
    """`OffloadingConnector` that hands the manifest's facts to the tiers and picks `KVStrataSpec`.

    A `spec_name` that the configuration gives is kept. Configuration that cannot work raises
    :class:`kvstrata.ConfigError` here, at start.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        compat.require_version()
        extra = choose_spec(vllm_config)
        _refuse_unsupported(vllm_config, kv_cache_config, extra)
        if role == KVConnectorRole.SCHEDULER:
            extra[facts.KEY] = _gather(vllm_config, kv_cache_config)
        else:
            selected = get_offloading_group_ids(kv_cache_config)
            extra[packed.KEY] = packed.pages(kv_cache_config, selected)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Declare the metrics of the spec that runs. Called in the API server's process."""
        choose_spec(vllm_config)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


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


def _gather(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any] | None:
    try:
        return facts.gather(vllm_config, kv_cache_config)
    except Exception:
        logger.exception(
            "kvstrata: the facts about this model could not be gathered; "
            "nothing is persisted unless 'model_identity' is set in the tier entry"
        )
        return None


def _refuse_unsupported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: dict[str, Any]
) -> None:
    nodes = int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1))
    if nodes > 1:
        msg = (
            f"kvstrata: one engine over {nodes} nodes is not supported, its ranks do not share "
            "memory: use tensor or pipeline parallelism within one node"
        )
        raise kvstrata.ConfigError(msg)
    if _several_blocks_per_chunk(extra):
        bounded = [
            group_id
            for group_id in get_offloading_group_ids(kv_cache_config)
            if not _looks_back_without_bound(kv_cache_config.kv_cache_groups[group_id])
        ]
        if bounded:
            msg = (
                f"kvstrata: KV cache groups {bounded} drop blocks behind their window, and vLLM "
                "may then send a chunk of several blocks with one missing in the middle, without "
                "saying which: set blocks_per_chunk to 1 (and no block_size) in "
                "kv_connector_extra_config"
            )
            raise kvstrata.ConfigError(msg)


def _several_blocks_per_chunk(extra: dict[str, Any]) -> bool:
    return extra.get("block_size") is not None or int(extra.get("blocks_per_chunk") or 1) > 1


def _looks_back_without_bound(group: Any) -> bool:
    return all(
        type(spec).__name__ in _UNBOUNDED_KINDS and getattr(spec, "sliding_window", None) is None
        for spec in iter_layer_specs(group.kv_cache_spec)
    )
