"""The memory of all slots: a memfd that one process makes and the others of its engine join.

Nothing of it has a name in a file system, so nothing is left behind however its processes end: the
kernel takes the memory back with the last of them. The creator hands the descriptor over an
abstract socket, whose name goes the same way (``unix(7)``, ``memfd_create(2)``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
import threading
import time
import weakref

import torch

from kvstrata.memory import numa
from kvstrata.memory.limits import Room
from kvstrata.memory.mapping import Mapping

_HEADER = struct.Struct("<8sQ")
_MAGIC = b"kvarena1"
_PEER = struct.Struct("3i")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_RETRY_SECONDS = 0.02
_ANSWER_SECONDS = 5.0
_OPTION = "cpu_bytes_to_use"

_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class ArenaError(ValueError):
    """An arena that cannot be made, joined, or trusted. The message names it."""


class Arena:
    """One contiguous region, the same memory in every process that holds one of this name.

    `nbytes` is its exact size. `tensor` is flat uint8, `buffer` a writable memoryview; both end
    with :meth:`close`.
    """

    def __init__(self, fd: int, nbytes: int, name: str) -> None:
        self.name = name
        self.nbytes = nbytes
        self._fd = fd
        self._map = Mapping(fd, nbytes)
        self.buffer: memoryview = self._map.view()
        # torch holds on to the object it is given, not to its buffer: with a memoryview of its own
        # the mapping cannot be closed under it.
        self.tensor: torch.Tensor = torch.frombuffer(self._map.view(), dtype=torch.uint8)
        self._server: _Server | None = None
        _open_arenas.add(self)

    @classmethod
    def create(
        cls,
        nbytes: int,
        name: str,
        *,
        numa_policy: str = "off",
        room: Room | None = None,
    ) -> Arena:
        """Make the arena `name` (the engine's id) and offer it to this user's processes.

        No page is touched here: memory is taken when it is first written, or by
        :class:`kvstrata.memory.largepages.LargePages`.

        # Errors
        :class:`kvstrata.memory.limits.MemoryRefusedError` for a size that this machine or container
        cannot give, :class:`ArenaError` where a process offers the name already.
        """
        if nbytes < 1:
            msg = f"an arena of {nbytes} bytes"
            raise ArenaError(msg)
        room = Room.now() if room is None else room
        room.require(nbytes, what="the CPU arena", option=_OPTION)
        offered = _bind(name)
        try:
            # The name is for those who look into /proc; nothing is found by it.
            fd = os.memfd_create(_label(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except BaseException:
            offered.close()
            raise
        try:
            os.ftruncate(fd, nbytes)
            # Whoever maps it can rely on its size: nobody can cut it off under them.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(fd, nbytes, name)
        except BaseException:
            offered.close()
            os.close(fd)
            raise
        try:
            numa.apply(numa_policy, arena.tensor.data_ptr(), nbytes)
            arena._server = _Server(offered, fd, _HEADER.pack(_MAGIC, nbytes))
        except BaseException:
            offered.close()
            arena.close()
            raise
        return arena

    @classmethod
    def join(cls, name: str, deadline_s: float) -> Arena:
        """Map the arena that another process of this host and user offers; wait for it at first.

        # Errors
        :class:`ArenaError` where nobody offers it within `deadline_s` seconds, or whoever does is
        another user or offers something else.
        """
        until = time.monotonic() + deadline_s
        while True:
            left = until - time.monotonic()
            try:
                with _connect(name, max(left, _RETRY_SECONDS)) as peer:
                    return cls._receive(peer, name)
            except (ConnectionError, TimeoutError, EOFError) as error:
                if until - time.monotonic() <= 0:
                    msg = (
                        f"no process of this host offered the CPU arena {name!r} within "
                        f"{deadline_s:g} s ({error}): rank 0 failed before it made it, or runs on "
                        "another node; all ranks of an engine have to run on one"
                    )
                    raise ArenaError(msg) from error
            time.sleep(_RETRY_SECONDS)

    @classmethod
    def _receive(cls, peer: socket.socket, name: str) -> Arena:
        _require_same_user(peer, name)
        told, fds, _, _ = socket.recv_fds(peer, _HEADER.size, 1)
        if len(told) != _HEADER.size or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise EOFError("it ended in the middle")
        (fd,) = fds
        try:
            os.set_inheritable(fd, False)  # noqa: FBT003 -- positional only
            return cls(fd, _checked_size(fd, told, name), name)
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The memfd; -1 when closed."""
        return self._fd

    def close(self) -> bool:
        """Unmap. `False` where someone holds a view: the memory goes with the last of them."""
        _open_arenas.discard(self)
        server, self._server = self._server, None
        if server is not None:
            server.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.tensor = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):
            self.buffer.release()
        return self._map.close()

    def _drop_in_child(self) -> None:
        """A forked child keeps no descriptor and answers nobody: it has no thread for it."""
        server, self._server = self._server, None
        if server is not None:
            server.forget()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _checked_size(fd: int, told: bytes, name: str) -> int:
    magic, nbytes = _HEADER.unpack(told)
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if magic != _MAGIC or os.fstat(fd).st_size != nbytes or seals & _SEALS != _SEALS:
        msg = f"what is offered as the CPU arena {name!r} is none"
        raise ArenaError(msg)
    return int(nbytes)


class _Server:
    """Hands the descriptor to whoever of this user asks, on a thread of its own."""

    def __init__(self, offered: socket.socket, fd: int, header: bytes) -> None:
        self._socket = offered
        self._fd = fd
        self._header = header
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvstrata-arena", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                # Closed; or, say, without a free descriptor, which passes.
                if self._ended.wait(_RETRY_SECONDS):
                    return
                continue
            with peer, contextlib.suppress(OSError, ArenaError):
                peer.settimeout(_ANSWER_SECONDS)
                _require_same_user(peer, "offered here")
                socket.send_fds(peer, [self._header], [self._fd])

    def close(self) -> None:
        """Stop offering, and wait for the answer under way: it uses the descriptor."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_ANSWER_SECONDS)
        self._socket.close()

    def forget(self) -> None:
        """In a forked child: the thread is not there."""
        self._socket.close()


def _label(name: str) -> str:
    """Short enough for a socket and a memfd, whatever the name."""
    return f"kvstrata-arena-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _address(name: str) -> bytes:
    """In the abstract namespace."""
    return b"\0" + _label(name).encode()


def _bind(name: str) -> socket.socket:
    offered = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        offered.bind(_address(name))
        offered.listen(64)
    except OSError as error:
        offered.close()
        msg = (
            f"the CPU arena {name!r} is offered by another process already ({error.strerror}): two "
            "engines with one id, or an engine that is still ending"
        )
        raise ArenaError(msg) from error
    return offered


def _connect(name: str, timeout: float) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        peer.settimeout(min(timeout, _ANSWER_SECONDS))
        peer.connect(_address(name))
    except BaseException:
        peer.close()
        raise
    return peer


def _require_same_user(peer: socket.socket, name: str) -> None:
    """Abstract names have no permissions: the kernel says who is at the other end."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(told)
    if uid != os.geteuid():
        msg = f"process {pid} of user {uid} is no process of the engine of arena {name!r}"
        raise ArenaError(msg)


def _after_fork() -> None:
    for arena in list(_open_arenas):
        arena._drop_in_child()  # noqa: SLF001 -- this module's own


os.register_at_fork(after_in_child=_after_fork)
