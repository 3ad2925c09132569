"""Removing row files from a directory that no engine uses.

A row file is given back whole. Its time of modification is that of its last row or its last access,
written down within half a minute: what was used longest ago goes first, file by file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstrata import places
from kvstrata.cli.ls import inventory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "kvstrata.lock"
IDLE_SECONDS = 86_400.0

_ROW_FILE = re.compile(r"[0-9a-f]{16}\.rows")


class UnusableError(Exception):
    """Nothing can be removed there; the message says why."""


@dataclass(frozen=True)
class RowFile:
    """A row file, by the namespace's directory that it is in."""

    namespace: str
    path: Path
    bytes: int
    used_at: float


def collect(
    url: str,
    *,
    capacity: int | None = None,
    older_than_s: float | None = None,
    time_limit_s: float | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Remove row files; returns the report that is printed.

    # Errors
    :class:`UnusableError`: no such directory, or an engine uses it. `KeyboardInterrupt` has the
    report of what was done as `report`.
    """
    until = None if time_limit_s is None else time.monotonic() + time_limit_s
    try:
        root = inventory.root_of(url)
    except inventory.UnreadableError as error:
        raise UnusableError(error) from error
    with _locked(root):
        files = list(_row_files(root))
        goes = _chosen(files, capacity, older_than_s, time.time())
        gone: list[RowFile] = []
        failed: list[str] = []
        try:
            for file in goes:
                if until is not None and time.monotonic() >= until:
                    return _report(files, gone, failed, "time limit")
                why = None if dry_run else _remove(file)
                if why is None:
                    gone.append(file)
                else:
                    failed.append(why)
        except KeyboardInterrupt as interrupt:
            interrupt.report = _report(files, gone, failed, "interrupted")  # type: ignore[attr-defined]
            raise
    return _report(files, gone, failed, "done")


def _report(
    files: list[RowFile], gone: list[RowFile], failed: list[str], ended: str
) -> dict[str, Any]:
    removed = {file.path for file in gone}
    kept = [file for file in files if file.path not in removed]
    left = {file.namespace for file in kept}
    return {
        "unit": "row files",
        "removed_rows": len(gone),
        "removed_bytes": sum(file.bytes for file in gone),
        "failed_rows": len(failed),
        "last_error": failed[-1] if failed else None,
        "kept_rows": len(kept),
        "kept_bytes": sum(file.bytes for file in kept),
        "emptied": sorted({file.namespace for file in gone} - left),
        "odd_names": 0,
        "ended": ended,
    }


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the root as an engine does."""
    try:
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        message = f"{root} is not a directory of a tier: it has no {LOCK}"
        raise UnusableError(message) from error
    except OSError as error:
        message = places.unusable(root / LOCK, error)
        raise UnusableError(message) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            message = (
                f"{root} is in use ({holder or 'by a process that does not say which'}); "
                "an engine keeps its own capacity"
            )
            raise UnusableError(message) from error
        yield
    finally:
        os.close(descriptor)


def _row_files(root: Path) -> Iterator[RowFile]:
    for path in sorted(root.glob("*/rows/g*/*.rows")):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and _ROW_FILE.fullmatch(path.name):
            namespace = path.parts[-4]
            yield RowFile(namespace, path, found.st_blocks * 512, found.st_mtime)


def _chosen(
    files: list[RowFile], capacity: int | None, older_than_s: float | None, now: float
) -> list[RowFile]:
    """What goes: by age, or of idle namespaces and then the coldest until the rest fits."""
    if older_than_s is not None:
        return [file for file in files if file.used_at < now - older_than_s]
    left = sum(file.bytes for file in files)
    newest: dict[str, float] = {}
    for file in files:
        newest[file.namespace] = max(newest.get(file.namespace, 0.0), file.used_at)

    def order(file: RowFile) -> tuple[bool, float, float]:
        idle = newest[file.namespace] < now - IDLE_SECONDS
        return (not idle, newest[file.namespace] if idle else 0.0, file.used_at)

    goes: list[RowFile] = []
    emptying = ""
    for file in sorted(files, key=order):
        # An idle namespace that has begun to go goes whole.
        if capacity is not None and left <= capacity and file.namespace != emptying:
            break
        idle = newest[file.namespace] < now - IDLE_SECONDS
        emptying = file.namespace if idle else ""
        left -= file.bytes
        goes.append(file)
    return goes


def _remove(file: RowFile) -> str | None:
    """Remove one file; returns why it is still there."""
    try:
        file.path.unlink(missing_ok=True)
    except OSError as error:
        return f"{file.path}: {error.strerror}"
    return None
