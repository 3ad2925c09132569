"""These tests need torch, and nothing of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

# Test folders are no packages and pytest does not put them on the path: the helpers are one.
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device; skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where KV tensors are."""
    found: torch.device = (
        torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("cuda")
    )
    return found
