"""Takes the arena's memory and registers it with the device, in the background, piece by piece.

Registered ("pinned") memory is what a device copies to and from without the host's help. To
register it takes seconds per ten gigabytes, so the engine serves meanwhile: a copy that meets a
piece which is not registered yet is slower, not wrong. Sizes are exact; a framework's allocator of
pinned memory would round up to the next power of two.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

SMALLEST_PIECE = 64 << 20
# For as long pieces wait for another process to take their memory, all of them together.
AWAIT_SECONDS_MAX = 150.0
_LOOK_SECONDS = 0.02
LARGEST_PIECE = 1 << 30
_PORTABLE = 1
_LIBRARIES = {"libcudart": "cuda", "libamdhip64": "hip"}


class Registrar(Protocol):
    """Registers host memory with a device."""

    def register(self, address: int, nbytes: int) -> bool:
        """`False` where the device refused; no error of it may be left for others to find."""

    def unregister(self, address: int) -> None:
        """Undo one :meth:`register`."""


class RuntimeRegistrar:
    """The runtime (CUDA's or HIP's) that torch has loaded into this process."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        self._register = library[f"{prefix}HostRegister"]
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = library[f"{prefix}HostUnregister"]
        self._unregister.argtypes = [ctypes.c_void_p]
        self._last_error = library[f"{prefix}GetLastError"]

    def register(self, address: int, nbytes: int) -> bool:
        """`False` where the runtime refused; its error is taken back."""
        code = self._register(address, nbytes, _PORTABLE)
        if code != 0:
            self._last_error()
            logger.info("kvstrata: registering %d bytes failed with code %d", nbytes, code)
        return bool(code == 0)

    def unregister(self, address: int) -> None:
        """Undo one :meth:`register`."""
        if self._unregister(address) != 0:
            self._last_error()


def loaded_runtime() -> RuntimeRegistrar | None:
    """The device runtime of this process, or `None` where there is none."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    except OSError:
        return None
    for path in sorted(paths):
        for name, prefix in _LIBRARIES.items():
            if os.path.basename(path).startswith(name):  # noqa: PTH119
                try:
                    return RuntimeRegistrar(ctypes.CDLL(path), prefix)
                except (OSError, AttributeError):
                    logger.warning("kvstrata: %s cannot register memory", path)
    return None


class Pinning:
    """The pieces of one mapping that are registered, and the thread that registers more.

    A piece that is refused is halved, down to :data:`SMALLEST_PIECE`; where even that is refused
    the rest stays pageable, with one warning. Pieces begin at multiples of
    :data:`SMALLEST_PIECE` from the start of the mapping, so copies that cross none of these cross
    no two registrations.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        registrar: Registrar | None,
        *,
        take: Callable[[int, int], None] | None = None,
        is_taken: Callable[[int], bool] | None = None,
        largest: int = LARGEST_PIECE,
        smallest: int = SMALLEST_PIECE,
    ) -> None:
        """Start. `take(offset, nbytes)` makes the pages resident before they are registered.

        Where another process does that, `is_taken(end)` says whether it has come to `end`: pages
        that are registered before can no longer be put together to large ones.
        """
        self.nbytes = nbytes
        self._address = address
        self._registrar = registrar
        self._take = take
        self._is_taken = is_taken
        self._awaits_until = time.monotonic() + AWAIT_SECONDS_MAX
        self._largest, self._smallest = largest, smallest
        self._pieces: list[tuple[int, int]] = []
        self._done = 0
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-pinning", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered now."""
        return sum(size for _, size in list(self._pieces))

    def wait_first(self, timeout_s: float) -> bool:
        """Wait until the first piece is registered, or it is known that none will be."""
        return self._first.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all was tried."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop, and unregister everything: the mapping may go then."""
        self._stop.set()
        self._thread.join()
        pieces, self._pieces = self._pieces, []
        for start, _ in reversed(pieces):
            if self._registrar is not None:
                self._registrar.unregister(self._address + start)

    def _run(self) -> None:
        try:
            self._take_all()
        except Exception:
            logger.exception(
                "kvstrata: %d of %d bytes of the arena are pinned, the rest stays pageable",
                self.pinned_bytes,
                self.nbytes,
            )
        finally:
            self._first.set()

    def _take_all(self) -> None:
        size, start = self._largest, 0
        while start < self.nbytes and not self._stop.is_set():
            piece = min(size, self.nbytes - start)
            if not self._take_pages(start, piece):
                return
            if self._registrar is not None:
                if not self._registrar.register(self._address + start, piece):
                    size = size // 2 // self._smallest * self._smallest
                    if size < self._smallest:
                        logger.warning(
                            "kvstrata: %d of %d bytes of the arena are pinned, the rest stays "
                            "pageable: copies there are slower",
                            start,
                            self.nbytes,
                        )
                        return
                    continue
                self._pieces.append((start, piece))
            start += piece
            self._first.set()
            self._report(start)

    def _take_pages(self, start: int, piece: int) -> bool:
        """Make a piece resident; `False` where it is to stop, which does not wait for all of it."""
        while self._is_taken is not None and not self._is_taken(start + piece):
            if self._stop.wait(_LOOK_SECONDS):
                return False
            if time.monotonic() >= self._awaits_until:
                self._is_taken = None
        if self._take is None:
            return True
        for place in range(start, start + piece, self._smallest):
            if self._stop.is_set():
                return False
            self._take(place, min(self._smallest, start + piece - place))
        return True

    def _report(self, done: int) -> None:
        tenth = done * 10 // self.nbytes
        if self._registrar is not None and tenth > self._done:
            self._done = tenth
            logger.info("kvstrata: %d%% of the arena's %d bytes pinned", tenth * 10, self.nbytes)
