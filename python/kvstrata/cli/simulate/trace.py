"""Traces from files, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from kvstrata._native import Trace

if TYPE_CHECKING:
    from pathlib import Path

_GZIP = b"\x1f\x8b"
# Bytes of a trace's lines that are read: a small file can be many bytes compressed.
_TEXT_MAX = 4 << 30


class UnreadableError(Exception):
    """A file that is not a trace, with the reason."""


def read(path: Path) -> Trace:
    """The trace in a file; ``UnreadableError`` where there is none."""
    try:
        return Trace(_text(path))
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError) as error:
        raise UnreadableError(f"{path}: {error}") from error


def _text(path: Path) -> bytes:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        lines = gzip.GzipFile(fileobj=file) if is_compressed else file
        content: bytes = lines.read(_TEXT_MAX + 1)
    if len(content) > _TEXT_MAX:
        raise ValueError(f"more than {_TEXT_MAX >> 30} GiB of lines")
    return content
