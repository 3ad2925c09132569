"""The package's top: what it offers and what importing it does."""

import subprocess
import sys

import kvstrata

QUIET_IMPORT = """
import os, sys
import kvstrata
assert "torch" not in sys.modules and "vllm" not in sys.modules
assert "numpy" not in sys.modules
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_importing_imports_neither_torch_nor_vllm_and_starts_no_thread() -> None:
    subprocess.run([sys.executable, "-c", QUIET_IMPORT], check=True)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in kvstrata.__all__:
        value = getattr(kvstrata, name)
        if name != "__version__":
            assert value.__doc__
            assert value.__module__ in {"kvstrata", "kvstrata.errors", "kvstrata._native"}


def test_the_defaults_are_those_of_the_documentation() -> None:
    import inspect

    signature = inspect.signature(kvstrata.open_tier)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty
    }
    # What stands for "not given" shows as an ellipsis.
    assert defaults == {
        "capacity": ...,
        "endpoint": ...,
        "region": ...,
        "addressing": "auto",
        "allow_http": False,
        "ca_bundle": ...,
        "requests_max": 32,
        "in_flight_max": "256MiB",
        "lookup_wait_s": 2.0,
        "found_s": 600.0,
        "absent_s": 15.0,
        "min_free": "5%",
        "policy": "lru",
        "io_backend": "auto",
        "deadline_s": 30.0,
        "share_mode": "private",
        "required": True,
        "honours_busy": False,
        "theta": 0.05,
        "store_threshold": 1,
        "tracked_keys": 64000,
        "directory": ...,
    }
    assert inspect.signature(kvstrata.Tier.close).parameters["timeout_s"].default == 10.0
