"""KV-cache storage tiers below the GPU for vLLM.

Importing this package imports neither vLLM nor torch and starts no threads.
"""

from kvstrata._native import (
    Fingerprint,
    JobResult,
    Tier,
    __version__,
    collect_garbage,
    manifest_differences,
    manifest_digest,
    open_tier,
)
from kvstrata.errors import ArgumentError, BusyError, ClosedError, ConfigError, KVStrataError

__all__ = [
    "ArgumentError",
    "BusyError",
    "ClosedError",
    "ConfigError",
    "Fingerprint",
    "JobResult",
    "KVStrataError",
    "Tier",
    "__version__",
    "collect_garbage",
    "manifest_differences",
    "manifest_digest",
    "open_tier",
]
