"""What loads from tiers below the CPU tier may take of time and of the arena."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadLimits:
    """See the module."""

    # Seconds that a request may be told that rows are on their way.
    wait_s: float = 10.0
    # Parts of the arena that rows from below may take before their requests take them: in all, so
    # that requests in a queue leave room for stores, and for one request, so that it can be loaded.
    share: float = 0.5
    request_share: float = 0.75
