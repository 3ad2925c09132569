"""The entry point ``vllm.general_plugins``: makes kvstrata's names known to vLLM."""

from __future__ import annotations

DISK_TIER = "kvstrata_disk"
SPEC = "KVStrataSpec"
SPEC_MODULE = "kvstrata.vllm.spec"
CONNECTOR = "KVStrataConnector"


def register() -> None:
    """Register the tier, the spec and the connector by name. Safe to call any number of times.

    A vLLM that is too old is told so in one line and gets no names; a server that does not use them
    is not disturbed.
    """
    from kvstrata.vllm import compat

    problem = compat.version_problem()
    if problem is not None:
        compat.log_once(40, problem)
        return
    compat.register_names(
        tiers={DISK_TIER: ("kvstrata.vllm.tiers", "KVStrataDiskTier")},
        specs={SPEC: (SPEC_MODULE, SPEC)},
        connectors={CONNECTOR: ("kvstrata.vllm.connector", CONNECTOR)},
    )
