"""The entry point ``vllm.general_plugins``: makes kvstrata's names known to vLLM."""

from __future__ import annotations

DISK_TIER = "kvstrata_disk"
OBJECT_TIER = "kvstrata_object"
SPEC = "KVStrataSpec"
SPEC_MODULE = "kvstrata.vllm.spec"
CONNECTOR = "KVStrataConnector"
POLICY_MODULE = "kvstrata.vllm.policy"
POLICIES = {
    "kvstrata_lru": "LRU",
    "kvstrata_arc_vllm": "ARC",
    "kvstrata_s3fifo": "S3FIFO",
    "kvstrata_th": "TH",
}


def register() -> None:
    """Register tiers, spec, connector and cache policies by name. Safe to call any number of times.

    A vLLM that is too old is told so in one line and gets no names; a server that does not use them
    is not disturbed.
    """
    from kvstrata.vllm import compat, logs

    logs.join()
    problem = compat.version_problem()
    if problem is not None:
        compat.log_once(40, problem)
        return
    compat.register_names(
        tiers={
            DISK_TIER: ("kvstrata.vllm.tiers", "KVStrataDiskTier"),
            OBJECT_TIER: ("kvstrata.vllm.tiers", "KVStrataObjectTier"),
        },
        specs={SPEC: (SPEC_MODULE, SPEC)},
        connectors={CONNECTOR: ("kvstrata.vllm.connector", CONNECTOR)},
        policies={name: (POLICY_MODULE, cls) for name, cls in POLICIES.items()},
    )
