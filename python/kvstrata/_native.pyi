"""The Rust core of kvstrata."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final, SupportsIndex, final

from _typeshed import WriteableBuffer

__all__ = ["JobResult", "Tier", "__version__", "open_tier"]

__version__: Final[str]
"""
Version of this build.
"""

@final
class JobResult:
    """What became of a job.

    * ``job_id``: the number given with the job.
    * ``kind``: ``"store"`` or ``"load"``.
    * ``success``: whether every outcome is ``"ok"`` or ``"present"``.
    * ``outcomes``: one per key, in the order of ``keys``: ``"ok"``, ``"present"`` (a store of a
      row that is there already), ``"miss"``, ``"corrupt"``, ``"no_space"``, ``"io_error"``,
      ``"timeout"`` or ``"dropped"``. Only after ``"ok"`` does the slot of a load hold the row.
    * ``busy``: positions whose slots the kernel still owns; empty unless ``honours_busy``.
    * ``bytes``: payload bytes moved.
    * ``seconds``: from the call to the end of the job.
    * ``error``: what went wrong, in one line; ``None`` when nothing did.
    """
    @property
    def busy(self, /) -> list[int]:
        """Positions whose slots the kernel still owns."""
    @property
    def bytes(self, /) -> int:
        """Payload bytes moved."""
    @property
    def error(self, /) -> str | None:
        """What went wrong, in one line."""
    @property
    def job_id(self, /) -> int:
        """The number given with the job."""
    @property
    def kind(self, /) -> str:
        """``"store"`` or ``"load"``."""
    @property
    def outcomes(self, /) -> list[str]:
        """One outcome per key, in the order of ``keys``."""
    @property
    def seconds(self, /) -> float:
        """Seconds from the call to the end of the job."""
    @property
    def success(self, /) -> bool:
        """Whether every outcome is ``"ok"`` or ``"present"``."""

@final
class Tier:
    """A storage tier on a directory; made by :func:`kvstrata.open_tier`.

    A key is a block hash (16 to 64 bytes) and a 4-byte big-endian group id; an offset is the
    byte offset of a slot in the arena. A slot of a store must not be written, nor one of a load
    read, before the job's result was polled. Every method may be called from any thread.

    A wrong argument raises ``ArgumentError`` (also a ``ValueError``), a closed tier
    ``ClosedError``; nothing else raises but ``close``. As a context manager the tier is closed
    at the end.
    """
    def __enter__(self, /) -> Tier: ...
    def __exit__(self, /, _type: object, _exception: object, _traceback: object) -> None: ...
    def __reduce__(self, /) -> tuple[Any, ...]: ...
    def busy_offsets(self, /) -> list[int]:
        """The slots that ended jobs named busy and the kernel still owns.

        Empty unless ``honours_busy``.
        """
    def capabilities(self, /) -> dict[str, Any]:
        """What was found out about the root when it was opened."""
    def close(self, /, timeout_s: float = ...) -> None:
        """Closes the tier and gives the arena back, within ``timeout_s`` seconds.

        Raises ``BusyError`` only while the kernel still owns bytes of the arena; call it again
        then. After success it does nothing. A child of a fork cannot close its parent's tier:
        there it does nothing either.
        """
    def drain(self, /) -> None:
        """Blocks without limit until no operation touches the arena; results stay to be polled."""
    def fileno(self, /) -> int:
        """An eventfd that is readable while results wait to be polled. It belongs to the tier."""
    def load(
        self,
        /,
        job_id: SupportsIndex,
        keys: Iterable[bytes | bytearray | memoryview],
        offsets: Iterable[SupportsIndex],
    ) -> None:
        """Starts to load the row of ``keys[i]`` into the slot at ``offsets[i]``; returns at once.

        ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
        """
    def lookup(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> list[bool | None]:
        """For each key: True when its row can be loaded, False when not, None when not known yet.

        None means: ask again. Answered from memory, never from disk; neither pins a row nor
        counts as an access.
        """
    def poll(self, /) -> list[JobResult]:
        """The results of jobs that ended since the last call; clears ``fileno()``."""
    def remove(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> None:
        """Hides each key's row at once; its space follows. Unknown keys are ignored."""
    def reset(self, /) -> bool:
        """Hides every row for good, also after a restart.

        Jobs in flight still deliver a result: stores ``"dropped"``, loads ``"miss"``. Returns
        False when the tier could not record it; the tier then serves nothing until a later reset
        was recorded.
        """
    def stats(self, /) -> dict[str, Any]:
        """Counters and gauges, with units in their names."""
    def store(
        self,
        /,
        job_id: SupportsIndex,
        keys: Iterable[bytes | bytearray | memoryview],
        offsets: Iterable[SupportsIndex],
    ) -> None:
        """Starts to store the slot at ``offsets[i]`` as the row of ``keys[i]``; returns at once.

        ``job_id`` is any number from 0 to 2**64 - 1 that is not in flight or unpolled.
        """
    def touch(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> None:
        """Counts as an access to each key's row; unknown keys are ignored."""
    def wait(self, /, timeout_s: float) -> list[JobResult]:
        """Blocks until a result is there or ``timeout_s`` seconds are over, then polls."""

def open_tier(
    url: str | PathLike[str],
    *,
    manifest: dict[str, Any],
    row_bytes: int | Mapping[int, int],
    arena: WriteableBuffer,
    capacity: str | int,
    min_free: str | int = ...,
    policy: str = ...,
    io_backend: str = ...,
    deadline_s: float = ...,
    share_mode: str = ...,
    required: bool = ...,
    honours_busy: bool = ...,
) -> Tier:
    """Opens a tier on a directory.

    * ``url``: ``file:///var/kv`` or a path; the directory is created if it is missing.
    * ``manifest``: identity fields, any JSON values. ``"model"`` (str, required) names the
      directory. Format version, group ids and ``row_bytes`` are added. Rows are only ever shared
      between tiers whose whole manifests are equal.
    * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
    * ``arena``: writable, C-contiguous buffer that holds the slots. The tier keeps it until it is
      closed: until then it can be neither freed nor resized.
    * ``capacity``: bytes the tier may use: ``"10GiB"``, ``"80%"`` of the file system, or an int.
    * ``min_free``: bytes to leave free on the file system, in the same forms.
    * ``policy``: which rows go first when space is needed; ``"lru"``.
    * ``io_backend``: ``"auto"``, ``"threads"`` or ``"uring"``.
    * ``deadline_s``: seconds after which an operation counts as failed.
    * ``share_mode``: ``"private"``: only this user can read the rows.
    * ``required``: False gives, where the root cannot be used, a tier that misses and retries by
      itself.
    * ``honours_busy``: False: a result comes only when the kernel has returned every operation on
      the job's slots. True: a load may end at its deadline with ``busy`` positions, and the caller
      does not reuse those slots while ``busy_offsets()`` names them.

    Raises ``ConfigError`` (also a ``ValueError``), which names the argument, path or field.
    """
