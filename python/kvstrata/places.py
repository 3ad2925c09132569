"""Directories as they are named on a command line or in a configuration: paths and file URLs."""

from __future__ import annotations

import contextlib
from pathlib import Path

_SCHEMES = ("file:", "s3:", "gs:", "az:", "memory:")
EXPECTED = "a path or file:///absolute/path is expected"


def directory(text: str) -> Path:
    """The directory that ``file:///var/kv`` or a path names; nothing is unquoted or expanded.

    Raises ``ValueError`` for any other URL, and for no text.
    """
    scheme, is_url, rest = text.partition("://")
    if (is_url and not (scheme == "file" and rest.startswith("/"))) or not text.strip():
        raise ValueError(f"{text!r}: {EXPECTED}")
    return Path(rest if is_url else text)


def unusable(path: Path, error: OSError) -> str:
    """Why a place cannot be read, in one line; whom it belongs to, where this user may not."""
    told = f"{path} cannot be read: {error.strerror}"
    if isinstance(error, PermissionError):
        with contextlib.suppress(OSError):
            told += f"; run this as its owner, uid {path.stat().st_uid}, or as root"
    return told


def doubt(text: str) -> str | None:
    """Why a path is hardly what was meant; ``None`` where nothing speaks against it.

    ``./~`` and ``./file:x`` say that it is.
    """
    # What stands before an @ may be credentials.
    shown = "..." if "@" in text else repr(text)
    if text != text.strip():
        return f"{shown}: it begins or ends with a space"
    if text.startswith("~"):
        return f"{shown}: ~ is expanded by the shell alone; write the whole path"
    if text.lower().startswith(_SCHEMES) and "://" not in text:
        return f"{shown}: a URL has two slashes after its scheme, as in file:///var/kv"
    return None
