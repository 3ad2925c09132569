"""Numbers of bytes as people write them, and how much memory there is to take them from."""

from __future__ import annotations

from pathlib import Path

import kvstrata
from kvstrata import units

_PERCENT = 100
# Unlimited groups say so with a number near the largest of 64 bits.
_UNLIMITED = 1 << 60


def parse(name: str, value: object, whole: int) -> int:
    """Bytes of ``"400GiB"``, ``"80%"`` of `whole` (0: of nothing), or a number of bytes.

    # Errors
    :class:`kvstrata.ConfigError` naming the option for anything else, and for less than one byte.
    """
    size = _bytes(value, whole)
    if size is None or size < 1:
        share = " or '80%'" if whole else ""
        msg = (
            f"{name!r} is {value!r}, not a size: a number of bytes, or a text like '400GiB'{share}"
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
    found = units.parse(value) if isinstance(value, str) else None
    if found is None:
        return None
    number, unit = found
    if unit == "%":
        return int(whole * number / _PERCENT) if number <= _PERCENT else None
    return int(number * units.UNITS[unit])


def shown(size: int) -> str:
    """A size for people: ``1.5 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= units.UNITS[unit.lower()]:
            number = f"{size / units.UNITS[unit.lower()]:.2f}".rstrip("0").rstrip(".")
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
