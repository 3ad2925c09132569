"""Fixtures for tests that run against whichever supported vLLM is importable."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm")

import kvstrata


class _KVStrataError(Exception):
    pass


class _ConfigError(_KVStrataError, ValueError):
    pass


class _ClosedError(_KVStrataError):
    pass


class _BusyError(_KVStrataError):
    pass


# Without the native module only its exceptions are missing: the stand-in does the rest.
HAS_NATIVE = hasattr(kvstrata, "open_tier")
if not HAS_NATIVE:
    for _name, _cls in {
        "KVStrataError": _KVStrataError,
        "ConfigError": _ConfigError,
        "ClosedError": _ClosedError,
        "BusyError": _BusyError,
    }.items():
        setattr(kvstrata, _name, _cls)

# Test folders are no packages and pytest does not put them on the path: the helpers are one.
sys.path.insert(0, str(Path(__file__).parent))

from plugin_support.stand_in import Opener  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of weight files are remembered in a place of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Every tier opened in the test is a stand-in."""
    opener = Opener()
    monkeypatch.setattr(kvstrata, "open_tier", opener, raising=False)
    return opener


@pytest.fixture(params=["stand_in", "native"])
def any_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once over the stand-in and once over the real tier."""
    if request.param == "native":
        if not HAS_NATIVE:
            pytest.skip("kvstrata._native is not built")
    else:
        monkeypatch.setattr(kvstrata, "open_tier", Opener(), raising=False)
    return str(request.param)


@pytest.fixture
def engine_id() -> Iterator[str]:
    """A unique engine id; what its shared region left behind is removed."""
    name = f"kvstrata-test-{uuid.uuid4().hex}"
    yield name
    for path in Path("/dev/shm").glob(f"vllm_offload_{name}*"):
        path.unlink()


@pytest.fixture
def registered() -> Iterator[None]:
    """kvstrata's names are registered for the test, and what was registered before is put back."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvstrata.vllm import plugin

    factories: list[Any] = [SecondaryTierFactory, OffloadingSpecFactory, KVConnectorFactory]
    before = [dict(factory._registry) for factory in factories]
    plugin.register()
    yield
    for factory, registry in zip(factories, before, strict=True):
        factory._registry.clear()
        factory._registry.update(registry)
