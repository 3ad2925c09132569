"""The arena's addresses: where large pages fit, no more than asked for, gone with the last view."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.memory import mapping
from kvstrata.memory.mapping import Mapping, large_page_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = large_page_bytes() or 4096
SIZE = 3 * LARGE + 4096 + 5


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("kvstrata-test")
    os.ftruncate(made, SIZE)
    yield made
    os.close(made)


def ranges() -> list[tuple[int, int, str]]:
    """Addresses of this process that are taken, with what is there."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        found.append((start, end, line))
    return found


def within(start: int, end: int) -> list[str]:
    return [line for first, last, line in ranges() if first < end and start < last]


def test_it_begins_where_a_large_page_can_and_is_as_long_as_was_said(fd: int) -> None:
    made = Mapping(fd, SIZE)
    assert made.address % LARGE == 0
    length = -(-SIZE // 4096) * 4096
    mine = [(start, end) for start, end, line in ranges() if "memfd:kvstrata-test" in line]
    assert mine == [(made.address, made.address + length)]
    view = made.view()
    assert (view.nbytes, view.format, view.readonly) == (SIZE, "B", False)
    view[SIZE - 1] = 7
    assert os.pread(fd, 1, SIZE - 1) == b"\7"
    os.pwrite(fd, b"\11", 5)
    assert view[5] == 9
    view.release()
    assert made.close()


def test_what_was_reserved_around_it_is_given_back(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[tuple[int, int]] = []
    real = mapping._munmap

    def munmap(start: int, length: int) -> int:
        unmapped.append((start, length))
        return int(real(start, length))

    monkeypatch.setattr(mapping, "_munmap", munmap)
    made = Mapping(fd, SIZE)
    length = -(-SIZE // 4096) * 4096
    around = sum(nbytes for _, nbytes in unmapped)
    assert around == LARGE, "addresses are lost with each mapping"
    for start, nbytes in unmapped:
        assert start + nbytes <= made.address or start >= made.address + length
    assert made.close()


def test_a_file_that_cannot_be_mapped_is_an_error_and_takes_no_addresses(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, int]] = []
    real = mapping._mmap

    def noting(address: int | None, length: int, *rest: int) -> int:
        answer: int = real(address, length, *rest)
        if address is None:
            reserved.append((answer, answer + length))
        return answer

    monkeypatch.setattr(mapping, "_mmap", noting)
    other = os.open("/proc/self/status", os.O_RDONLY)
    with pytest.raises(OSError, match=r"denied|No such device"):
        Mapping(other, SIZE)
    os.close(other)
    assert len(reserved) == 1
    assert not within(*reserved[0])
    assert Mapping(fd, SIZE).close()


def test_the_memory_stays_until_the_last_view_is_gone(fd: int) -> None:
    made = Mapping(fd, SIZE)
    address = made.address
    first, second = made.view(), made.view()
    part = second[4:9]
    part[0] = 3
    first.release()
    assert not made.close()
    assert "memfd:kvstrata-test" in within(address, address + SIZE)[0]
    assert part[0] == 3
    with pytest.raises(ValueError, match="closed"):
        made.view()
    del part, second
    assert made.close()
    assert not [line for line in within(address, address + SIZE) if "kvstrata-test" in line]


def test_the_size_of_a_large_page_is_the_machines_or_unknown(tmp_path: Path) -> None:
    with contextlib.suppress(OSError):
        told = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text()
        assert large_page_bytes() == int(told)
    assert large_page_bytes(tmp_path / "none") is None
    (tmp_path / "odd").write_text("large\n")
    assert large_page_bytes(tmp_path / "odd") is None
