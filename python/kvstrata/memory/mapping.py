"""A memfd in this process's memory, at an address that takes large pages.

``mmap(2)`` puts a shared mapping at any page; only one whose address and offset are alike modulo
the size of a large page can have large pages in its page table.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PROT_NONE, _MAP_FIXED = 0, 0x10
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def large_page_bytes(path: Path = _SIZE) -> int | None:
    """Bytes of a large page of this machine; `None` where it has none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class Mapping:
    """All `nbytes` of the file `fd`, shared, readable and writable.

    The memory stays mapped until :meth:`close` and as long as any view lives.

    # Errors
    `OSError` where the kernel refuses.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        alignment = large_page_bytes() or mmap.PAGESIZE
        self.address = _map(fd, nbytes, alignment)
        owner = (ctypes.c_ubyte * nbytes).from_address(self.address)
        # Not at exit: other threads may still look there.
        self._unmap = weakref.finalize(owner, _munmap, self.address, nbytes)
        self._unmap.atexit = False
        self._owner: ctypes.Array[ctypes.c_ubyte] | None = owner

    def view(self) -> memoryview:
        """All of it, flat, of format ``B``.

        # Errors
        `ValueError` after :meth:`close`.
        """
        if self._owner is None:
            msg = "the mapping is closed"
            raise ValueError(msg)
        return memoryview(self._owner).cast("B")

    def close(self) -> bool:
        """Unmap. `False` where views are left: the memory goes with the last of them."""
        self._owner = None
        return not self._unmap.alive


def _map(fd: int, nbytes: int, alignment: int) -> int:
    """Map at a multiple of `alignment`, within addresses that were reserved before."""
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _checked(_mmap(None, length + alignment, _PROT_NONE, flags, -1, 0))
    start = -(-reserved // alignment) * alignment
    end = reserved + length + alignment
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _checked(_mmap(start, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except BaseException:
        _munmap(reserved, length + alignment)
        raise
    if start > reserved:
        _munmap(reserved, start - reserved)
    _munmap(start + length, end - start - length)
    return start


def _checked(answer: int | None) -> int:
    if answer is None or answer == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer
