"""How much memory this process may still take, by the three who have a say.

All numbers are bytes, as of now; what others take next is not foreseen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30


class MemoryRefusedError(ValueError):
    """A size that this machine or container cannot give. The message has the three numbers."""


@dataclass(frozen=True)
class Room:
    """What is free: on the machine, under the tightest cgroup limit, and in ``/dev/shm``.

    `None` where there is no limit, or none can be read. Anonymous memory, a memfd included, does
    not count against the size of ``/dev/shm``.
    """

    memory: int | None
    cgroup: int | None
    shm: int | None

    @classmethod
    def now(cls, top: Path = Path("/")) -> Room:
        """As ``/proc`` and ``/sys/fs/cgroup`` below `top` say."""
        return cls(_available(top / "proc/meminfo"), _cgroup_room(top), _shm_room(top))

    def require(self, size: int, *, what: str, option: str, in_shm: bool = False) -> None:
        """Refuse a size that does not fit.

        # Errors
        :class:`MemoryRefusedError`, naming all three numbers and `option`.
        """
        bounds = [self.memory, self.cgroup, self.shm if in_shm else None]
        if all(bound is None or size <= bound for bound in bounds):
            return
        shm = _say(self.shm) if in_shm else f"{_say(self.shm)} (no limit here)"
        msg = (
            f"{what} needs {_say(size)}: the machine has {_say(self.memory)} available, the cgroup "
            f"leaves {_say(self.cgroup)}, /dev/shm has {shm}; lower {option}"
        )
        raise MemoryRefusedError(msg)


def _say(size: int | None) -> str:
    return "no limit" if size is None else f"{size} bytes ({size / _GIB:.2f} GiB)"


def _available(path: Path) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _shm_room(top: Path) -> int | None:
    try:
        stat = os.statvfs(top / "dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _cgroup_room(top: Path) -> int | None:
    """The least that any group from our own up to the root leaves; page cache can be taken back."""
    try:
        lines = (top / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, names = top / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = top / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / inside.lstrip("/")
        # In a container the path may be the host's, and only the root of it is mounted.
        while here == base or base in here.parents:
            rooms.append(_room_of(here, *names))
            here = here.parent
    return min((room for room in rooms if room is not None), default=None)


def _room_of(group: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        allowed = (group / limit).read_text(encoding="ascii").strip()
        if allowed == "max" or int(allowed) >= 1 << 60:
            return None
        taken = int((group / used).read_text(encoding="ascii"))
        stats = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        freeable = sum(int(line.split()[1]) for line in stats if line.split()[0] == cache)
    except (OSError, ValueError, IndexError):
        return None
    return max(0, int(allowed) - max(0, taken - freeable))
