"""Taking memory in large pages: all of it comes, in whatever pages the kernel gives."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.memory import largepages
from kvstrata.memory.largepages import REFUSALS_MAX, SECONDS_MAX, LargePages
from kvstrata.memory.mapping import Mapping
from kvstrata.memory.pinning import Pinning

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
# As the tests' kernel is told to have.
LARGE = 16 * PAGE


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largepages, "large_page_bytes", lambda: LARGE)


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("kvstrata-test")
    yield made
    os.close(made)


class Kernel:
    """Answers as it is told, and notes what it was asked for."""

    def __init__(self, answers: list[int] | None = None, seconds: float = 0.0) -> None:
        self.answers = [] if answers is None else answers
        self.seconds = seconds
        self.now = 0.0
        self.asked: list[int] = []

    def ask(self, address: int, nbytes: int) -> int:
        assert nbytes == LARGE
        self.asked.append(address)
        self.now += self.seconds
        return self.answers.pop(0) if self.answers else 0

    def pages(self, fd: int, nbytes: int, *, wanted: bool = True) -> LargePages:
        os.ftruncate(fd, nbytes)
        return LargePages(fd, 0, nbytes, wanted=wanted, ask=self.ask, clock=lambda: self.now)


def resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_every_whole_large_page_is_asked_for_once_and_all_is_taken(
    fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel()
    nbytes = 5 * LARGE + PAGE
    pages = kernel.pages(fd, nbytes)
    with caplog.at_level(logging.INFO, "kvstrata"):
        pages.take(0, 2 * LARGE)
        # A device that refused to register so much is given less, of the same place.
        pages.take(0, LARGE)
        pages.take(LARGE, LARGE)
        assert resident(fd) == 2 * LARGE
        pages.take(2 * LARGE, 3 * LARGE + PAGE)
    assert kernel.asked == [0, LARGE, 2 * LARGE, 3 * LARGE, 4 * LARGE]
    assert pages.large_bytes == 5 * LARGE
    assert resident(fd) == nbytes, "more or less was taken than asked for"
    assert f"{5 * LARGE} of {nbytes} bytes" in caplog.text


def test_how_far_another_process_has_come_is_seen(fd: int) -> None:
    kernel = Kernel()
    pages = kernel.pages(fd, 3 * LARGE + 7)
    for end in (LARGE, 2 * LARGE, 3 * LARGE + 7):
        before = os.fstat(fd).st_blocks * 512
        assert not largepages.taken(fd, end)
        pages.take(before, end - before)
        assert largepages.taken(fd, end)
        assert largepages.taken(fd, end - LARGE)


@pytest.mark.parametrize("small_pages", [16, 32, 512, 8192])
def test_the_memory_nodes_take_turns(small_pages: int) -> None:
    pages = 4096
    large_page = small_pages * PAGE
    firsts = [number * large_page for number in range(pages)]
    firsts = [place + largepages.first_page(place, large_page) for place in firsts]
    assert all(place // large_page == number for number, place in enumerate(firsts))
    for nodes in range(2, 17):
        # As the kernel does: the number of the small page, modulo the nodes.
        turns = Counter(place // PAGE % nodes for place in firsts)
        assert min(turns[node] for node in range(nodes)) > 0.9 * pages / nodes, nodes
        assert max(turns.values()) < 1.1 * pages / nodes, nodes


def test_a_kernel_that_does_not_know_how_is_asked_once(fd: int) -> None:
    kernel = Kernel([errno.EINVAL])
    pages = kernel.pages(fd, 8 * LARGE)
    pages.take(0, 4 * LARGE)
    pages.take(4 * LARGE, 4 * LARGE)
    assert kernel.asked == [0]
    assert (pages.large_bytes, resident(fd)) == (0, 8 * LARGE)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EBUSY, errno.EAGAIN])
def test_a_refusal_that_may_pass_costs_one_page(fd: int, error: int) -> None:
    kernel = Kernel([0, error, 0, error])
    pages = kernel.pages(fd, 6 * LARGE)
    pages.take(0, 6 * LARGE)
    assert len(kernel.asked) == 6
    assert (pages.large_bytes, resident(fd)) == (4 * LARGE, 6 * LARGE)


def test_a_kernel_that_has_none_left_is_let_be(fd: int) -> None:
    kernel = Kernel([errno.ENOMEM] * (REFUSALS_MAX - 1) + [0] + [errno.ENOMEM] * (2 * REFUSALS_MAX))
    nbytes = 4 * REFUSALS_MAX * LARGE
    pages = kernel.pages(fd, nbytes)
    pages.take(0, nbytes)
    assert len(kernel.asked) == 2 * REFUSALS_MAX
    assert (pages.large_bytes, resident(fd)) == (LARGE, nbytes)


def test_a_kernel_that_takes_long_is_let_be(fd: int) -> None:
    kernel = Kernel(seconds=SECONDS_MAX / 4)
    pages = kernel.pages(fd, 10 * LARGE)
    pages.take(0, 10 * LARGE)
    assert len(kernel.asked) == 4
    assert (pages.large_bytes, resident(fd)) == (4 * LARGE, 10 * LARGE)


def test_where_none_are_wanted_or_known_the_kernel_is_not_asked(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    kernel.pages(fd, 2 * LARGE, wanted=False).take(0, 2 * LARGE)
    assert resident(fd) == 2 * LARGE
    monkeypatch.setattr(largepages, "large_page_bytes", lambda: None)
    kernel.pages(fd, 3 * LARGE).take(0, 3 * LARGE)
    assert resident(fd) == 3 * LARGE
    assert not kernel.asked


def test_the_kernel_keeps_what_was_written_and_says_how_much_is_in_large_pages(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    nbytes = (8 << 20) + PAGE
    os.ftruncate(fd, nbytes)
    mapping = Mapping(fd, nbytes)
    view = mapping.view()
    places = range(0, nbytes, 300 << 10)
    for place in places:
        view[place] = place % 251
    pages = LargePages(fd, mapping.address, nbytes)
    pinning = Pinning(mapping.address, nbytes, None, take=pages.take)
    assert pinning.wait(60)
    pinning.close()
    assert all(view[place] == place % 251 for place in places)
    assert sum(view[place + 1] for place in places) == 0
    assert resident(fd) == nbytes
    assert mapped_in_large_pages(mapping.address) == pages.large_bytes
    view.release()
    assert mapping.close()


def mapped_in_large_pages(address: int) -> int:
    """As the kernel counts them, in bytes."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    for line in lines:
        if line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    pytest.fail("the kernel does not say")
