"""KV-cache storage tiers below the GPU for vLLM.

Importing this package imports neither vLLM nor torch and starts no threads.
"""

from kvstrata._native import JobResult, Tier, __version__, open_tier
from kvstrata.errors import ArgumentError, BusyError, ClosedError, ConfigError, KVStrataError

__all__ = [
    "ArgumentError",
    "BusyError",
    "ClosedError",
    "ConfigError",
    "JobResult",
    "KVStrataError",
    "Tier",
    "__version__",
    "open_tier",
]
