"""How much memory may be taken, by files like those of /proc and /sys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.memory.limits import MemoryRefusedError, Room

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def machine(
    top: Path, *, available_kib: int = 1 << 20, cgroup: str = "0::/a/b\n", **files: str
) -> Path:
    (top / "proc/self").mkdir(parents=True)
    (top / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {available_kib} kB\n")
    (top / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = top / "sys/fs/cgroup" / name.replace("__", "/").replace("_at_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def group(prefix: str, limit: str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{prefix}memory_at_max": f"{limit}\n",
        f"{prefix}memory_at_current": f"{used}\n",
        f"{prefix}memory_at_stat": f"anon 5\ninactive_file {cache}\n",
    }


def test_the_tightest_group_above_us_counts_and_its_cache_does_not(tmp_path: Path) -> None:
    top = machine(
        tmp_path,
        **group("a__b__", "max", 7, 0),
        **group("a__", str(512 * MIB), 200 * MIB, 50 * MIB),
        **group("", str(900 * MIB), 0, 0),
    )
    assert Room.now(top) == Room(memory=1 << 30, cgroup=362 * MIB, shm=None)


def test_a_path_that_only_the_host_has_leaves_the_container_s_own_limit(tmp_path: Path) -> None:
    top = machine(tmp_path, cgroup="0::/docker/abc\n", **group("", str(64 * MIB), 0, 0))
    assert Room.now(top).cgroup == 64 * MIB


def test_the_older_hierarchy_is_read_too(tmp_path: Path) -> None:
    files = {
        "memory__x__memory_at_limit_in_bytes": f"{100 * MIB}",
        "memory__x__memory_at_usage_in_bytes": f"{30 * MIB}",
        "memory__x__memory_at_stat": f"total_inactive_file {10 * MIB}",
    }
    top = machine(tmp_path, cgroup="3:cpu,cpuacct:/x\n5:memory:/x\n", **files)
    assert Room.now(top).cgroup == 80 * MIB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    assert Room.now(machine(tmp_path, **group("a__b__", "max", 7, 0))).cgroup is None
    assert Room.now(tmp_path / "nothing") == Room(None, None, None)


@pytest.mark.parametrize(
    ("room", "refused"),
    [
        (Room(1000, None, None), False),
        (Room(999, None, None), True),
        (Room(1000, 999, 5000), True),
        (Room(1000, 1000, 0), False),
    ],
)
def test_a_size_is_refused_with_the_three_numbers_and_the_option(room: Room, refused: bool) -> None:
    if not refused:
        room.require(1000, what="the arena", option="cpu_bytes_to_use")
        return
    with pytest.raises(MemoryRefusedError) as told:
        room.require(1000, what="the arena", option="cpu_bytes_to_use")
    text = str(told.value)
    for number in (1000, room.memory, room.cgroup, room.shm):
        assert ("no limit" if number is None else f"{number} bytes") in text
    assert "cpu_bytes_to_use" in text


def test_shared_memory_files_count_against_their_own_room() -> None:
    with pytest.raises(MemoryRefusedError):
        Room(1000, None, 10).require(1000, what="x", option="y", in_shm=True)
