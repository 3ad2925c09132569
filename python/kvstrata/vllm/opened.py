"""What a manager works on once the workers' bytes are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata._native import CpuTier
    from kvstrata.vllm.below import TierBelow


@dataclass(frozen=True)
class Opened:
    """The CPU tier and the tiers below it."""

    cpu: CpuTier
    tiers: tuple[TierBelow, ...]
    # Lets the arena go; called when no tier has it any more.
    release: Callable[[], object]
    # Tiers that were configured and persist nothing, by name.
    off: tuple[str, ...] = ()
    # What vLLM publishes of the CPU tier and of each tier below (:mod:`kvstrata.vllm.configinfo`).
    config_info: tuple[Mapping[str, Any], ...] = ()
