"""Digests of large files, read once and remembered while inode, size and times are the same.

The memory is one small file per weight file under ``$XDG_CACHE_HOME/kvstrata/weights``
(``~/.cache`` without it), readable by its owner alone. Where it cannot be used, files are read
again at every start: slower, not wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstrata

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES = 4 << 20
# Smaller files are read faster than anybody notices.
REMEMBERED_BYTES_MIN = 64 << 20
# A file that was changed this shortly before it was read could change again and its times would not
# tell, so that its digest is not remembered: within the same tick of the file system's clock, or
# through a mapping, which counts as a change only when a page is first written since the kernel
# wrote it back (35 s, as it is set up).
SETTLED_NS = 60 * 10**9
# Where nothing is ever written back, changes through a mapping leave no trace in a file's times.
UNTIMED = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})

_DIRECTORY_MODE = 0o700
_OTHERS = 0o022


class UnstableFileError(Exception):
    """A file changed while it was read."""


def default_memory() -> Path:
    """Where digests are remembered."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstrata" / "weights"


def file_digest(
    path: Path, memory: Path | None = None, clock: Callable[[], int] = time.time_ns
) -> str:
    """The blake3 digest of a file's content, 64 hexadecimal digits; links are followed.

    # Errors
    `OSError` where it cannot be read, :class:`UnstableFileError` where it changes meanwhile.
    """
    with path.open("rb") as file:
        before = _stamp(os.fstat(file.fileno()))
        place = default_memory() if memory is None else memory
        is_worth_it = before["size"] >= REMEMBERED_BYTES_MIN and _has_times(before["device"])
        directory = _usable(place) if is_worth_it else None
        known = None if directory is None else _recall(directory, before)
        if known is not None:
            return known
        digest = kvstrata.Fingerprint()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
        if _stamp(os.fstat(file.fileno())) != before:
            msg = f"{path} changed while it was read"
            raise UnstableFileError(msg)
    found = digest.hexdigest()
    changed = max(before["mtime_ns"], before["ctime_ns"])
    settled = clock() - changed > SETTLED_NS
    if directory is not None and settled:
        _remember(directory, before, found)
    return found


def _stamp(status: os.stat_result) -> dict[str, int]:
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _has_times(device: int) -> bool:
    """Whether every change of a file on a device shows in its times."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    found = {
        line.partition(" - ")[2].split(" ")[0]
        for line in mounts.splitlines()
        if line.split(" ")[2:3] == [number]
    }
    return not found & UNTIMED


def _usable(memory: Path) -> Path | None:
    """The directory, made where it is missing; `None` where somebody else could write into it."""
    try:
        memory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        status = memory.stat()
    except OSError:
        return None
    mine = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
    return memory if mine else None


def _place(memory: Path, stamp: dict[str, int]) -> Path:
    return memory / f"{stamp['device']:x}-{stamp['inode']:x}.json"


def _recall(memory: Path, stamp: dict[str, int]) -> str | None:
    try:
        entry: Any = json.loads(_place(memory, stamp).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("stamp") != stamp:
        return None
    digest = entry.get("blake3")
    return digest if isinstance(digest, str) and _is_digest(digest) else None


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")  # noqa: PLR2004 -- 256 bits


def _remember(memory: Path, stamp: dict[str, int], digest: str) -> None:
    text = json.dumps({"stamp": stamp, "blake3": digest}) + "\n"
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", dir=memory, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Path(file.name).replace(_place(memory, stamp))
