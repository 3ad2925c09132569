"""Numbers of bytes as people write them, and how much memory there is to take them from."""

from __future__ import annotations

import re
from pathlib import Path

import kvstrata

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")
_PERCENT = 100.0
# Unlimited groups say so with a number near the largest of 64 bits.
_UNLIMITED = 1 << 60


def parse(name: str, value: object, whole: int) -> int:
    """Bytes of ``"400GiB"``, ``"80%"`` of `whole`, or a number of bytes.

    # Errors
    :class:`kvstrata.ConfigError` naming the option for anything else, and for less than one byte.
    """
    size = _bytes(value, whole)
    if size is None or size < 1:
        msg = (
            f"{name!r} is {value!r}, not a size: a number of bytes, or a text like "
            "'400GiB' or '80%'"
        )
        raise kvstrata.ConfigError(msg)
    return size


def _bytes(value: object, whole: int) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if 0 <= value < float(_UNLIMITED) else None
    found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return int(whole * number / _PERCENT) if number <= _PERCENT else None
    return int(number * _UNITS[unit]) if unit in _UNITS else None


def shown(size: int) -> str:
    """A size for people: ``1.5 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()]:
            number = f"{size / _UNITS[unit.lower()]:.2f}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return f"{size} B"


def memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can be given: the machine's, or its group's limit."""
    limits = [_physical(root), *_of_groups(root)]
    return min(limit for limit in limits if limit > 0)


def _physical(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) << 10
    return 0


def _of_groups(root: Path) -> list[int]:
    """Limits of the control groups above this process, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            limits += _up(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _up(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return limits


def _up(mount: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of all above it. In a container the mount is its own group."""
    parts = [part for part in path.split("/") if part not in {"", "..", "."}]
    limits = []
    for length in range(len(parts), -1, -1):
        try:
            text = mount.joinpath(*parts[:length], name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            limits.append(int(text))
    return limits
