"""Traces from files, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from kvstrata._native import Trace

if TYPE_CHECKING:
    from pathlib import Path

_GZIP = b"\x1f\x8b"


class UnreadableError(Exception):
    """A file that is not a trace, with the reason."""


def read(path: Path) -> Trace:
    """The trace in a file; ``UnreadableError`` where there is none."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        return Trace(content)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UnreadableError(f"{path}: {error}") from error
