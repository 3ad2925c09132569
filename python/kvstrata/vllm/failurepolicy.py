"""What vLLM does with a request whose load failed, and what has to be so for us."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvstrata.vllm import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RECOMPUTE = "recompute"
SYNC_LOADS = "sync_load_budget_bytes"


def check(vllm_config: VllmConfig, extra: dict[str, Any], *, exact: bool) -> None:
    """Warn where a failed load fails its request; with `exact` slots keep loads asynchronous.

    A synchronous load (vLLM 0.33) runs in the step of its request, so that nothing could take its
    blocks back.
    """
    policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", RECOMPUTE)
    if policy != RECOMPUTE:
        compat.log_once(
            logging.WARNING,
            f"kvstrata: kv_load_failure_policy is {policy!r}: a request whose rows cannot be "
            f"loaded will fail; set it to {RECOMPUTE!r}, and it is computed instead",
        )
    if exact and extra.get(SYNC_LOADS):
        compat.log_once(
            logging.WARNING,
            f"kvstrata: {SYNC_LOADS}={extra[SYNC_LOADS]!r} is taken as 0: a synchronous load that "
            "fails cannot be taken back",
        )
        extra[SYNC_LOADS] = 0
