"""Takes the arena's memory in large pages, as far as the kernel has them.

A copy to a device or disk hands over runs of memory: 2 MiB are one run in a large page and up to
512 in small ones, each pinned and described by itself, and a device that takes few runs at once
gets a row in several requests. The kernel gives a memfd no large pages by itself unless the machine
is set up so (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``), but puts small ones together
when asked (``MADV_COLLAPSE``, ``madvise(2)``, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time
from typing import TYPE_CHECKING

from kvstrata.memory.mapping import large_page_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Where memory is in pieces the kernel moves others' pages away first: two minutes are enough.
SECONDS_MAX = 120.0
REFUSALS_MAX = 64
_COLLAPSE = 25
_BLOCK = 512
# Odd, and about 0.618 of the small pages of the usual large one: no number of nodes falls in step.
_STRIDE = 317
# No memory in one piece, none that the control group grants, or a page in use just now.
_PASSING = (errno.ENOMEM, errno.EBUSY, errno.EAGAIN)

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def collapse(address: int, nbytes: int) -> int:
    """Ask for one large page at `address`; 0, or the number of the error."""
    return 0 if _madvise(address, nbytes, _COLLAPSE) == 0 else ctypes.get_errno()


def first_page(place: int, page: int) -> int:
    """Which small page of the large one at `place` is there first, as an offset into it.

    The large page goes to that one's memory node. A policy that goes round the nodes takes a small
    page's number modulo theirs: always the first one of each would put all on one node.
    """
    small = page // mmap.PAGESIZE
    return place // page * _STRIDE % small * mmap.PAGESIZE


def taken(fd: int, end: int) -> bool:
    """Whether as much of a memfd is resident as lies before `end`."""
    return os.fstat(fd).st_blocks * _BLOCK >= end


class LargePages:
    """Makes the pages of a mapped memfd resident, without touching what others may have written.

    It stops asking for large ones where the kernel does not know how, after :data:`REFUSALS_MAX`
    refusals in a row, and when that has taken :data:`SECONDS_MAX`: the rest comes in small ones.
    """

    def __init__(
        self,
        fd: int,
        address: int,
        nbytes: int,
        *,
        wanted: bool = True,
        ask: Callable[[int, int], int] = collapse,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.large_bytes = 0
        self._fd, self._address, self._nbytes = fd, address, nbytes
        self._ask, self._clock = ask, clock
        self._page = large_page_bytes() if wanted else None
        self._asks = self._page is not None
        self._asked_to = 0
        self._seconds = 0.0
        self._refusals = 0

    def take(self, offset: int, nbytes: int) -> None:
        """Make ``[offset, offset + nbytes)`` resident.

        # Errors
        `OSError` where there is no memory.
        """
        if self._page is not None and self._asks:
            self._take_large(offset, offset + nbytes, self._page)
        os.posix_fallocate(self._fd, offset, nbytes)
        if offset + nbytes == self._nbytes and self._page is not None:
            logger.info(
                "kvstrata: %d of %d bytes of the arena are in large pages (%.1f s)",
                self.large_bytes,
                self._nbytes,
                self._seconds,
            )

    def _take_large(self, start: int, end: int, page: int) -> None:
        for place in range(-(-start // page) * page, end - page + 1, page):
            if place < self._asked_to:
                continue
            self._asked_to = place + page
            began = self._clock()
            # The kernel puts nothing together where there is nothing.
            os.posix_fallocate(self._fd, place + first_page(place, page), mmap.PAGESIZE)
            error = self._ask(self._address + place, page)
            self._seconds += self._clock() - began
            if error == 0:
                self.large_bytes += page
                self._refusals = 0
            else:
                self._refusals += 1
            refuses = self._refusals >= REFUSALS_MAX or (error != 0 and error not in _PASSING)
            if refuses or self._seconds >= SECONDS_MAX:
                self._asks = False
                return
