"""The Rust core of kvstrata."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem, WriteableBuffer

__all__ = [
    "CacheOrder",
    "CpuTier",
    "Fingerprint",
    "JobResult",
    "LruOrder",
    "RequestBook",
    "Tier",
    "Trace",
    "__version__",
    "collect_garbage",
    "manifest_differences",
    "manifest_digest",
    "open_tier",
]

__version__: Final[str]
"""
Version of this build.
"""

@final
class CacheOrder:
    """The order in which chunks go.

    Of keys that are inserted in a row with ``tail_first`` the last is the oldest. ``chunks``: what
    is there, by key. ``kept`` and ``freed``: append a key that is to stay from now on, and one that
    may go again, as often as it was kept.
    """
    def __new__(cls, /, policy: str, capacity: SupportsIndex, tail_first: bool) -> CacheOrder:
        """An empty order for so many chunks.

        Raises ``ConfigError`` for a policy that is not known.
        """
    @property
    def chunks(self, /) -> Any: ...
    def end(self, /, keys: SupportsGetItem[int, Any], stored: Any, used: Any) -> None:
        """Says that a request has ended that had these keys, in token order.

        It stored some of them and used others.
        """
    def evict(self, /, n: SupportsIndex, protected: Any) -> list[Any] | None:
        """Takes out exactly ``n`` keys that may go and are not protected, coldest first.

        They are returned with their chunks. Where there are fewer, none is taken out, and it
        returns ``None``.
        """
    @property
    def freed(self, /) -> Any: ...
    def insert(self, /, key: Any, chunk: Any, req_context: Any | None = None) -> None:
        """Adds a key with its chunk. Of the request nothing is used."""
    @property
    def kept(self, /) -> Any: ...
    def memory_bytes(self, /) -> int:
        """Bytes of memory of the policy."""
    def miss(self, /, keys: SupportsGetItem[int, Any]) -> None:
        """Says that keys, in token order, are not there and are about to be inserted."""
    def remove(self, /, key: Any) -> None:
        """Forgets a key.

        Raises ``KeyError`` if it is not there.
        """
    def touch(self, /, keys: SupportsGetItem[int, Any]) -> None:
        """Counts an access to keys in token order; those that are not there are passed."""

@final
class CpuTier:
    """Which key's row is in which slot of an arena, and which rows go when space is needed.

    * ``arena_bytes``: length of the arena. The tier never touches the arena itself.
    * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
    * ``align``: what every slot's offset is a multiple of; a power of two.
    * ``policy``: which rows go first when space is needed; ``"lru"``.
    * ``theta``, ``store_threshold``, ``tracked_keys``, ``directory``: as for ``open_tier``, but
      that ``theta`` is 0.0 where it is not given. Rows from a tier below are always taken.
    * ``protect_waiting``: whether rows stay for requests that were observed and do not run yet, in
      up to half of the arena.

    Keys are as for :class:`kvstrata.Tier`. Every method may be called from any thread and takes
    microseconds. A use of a slot by a tier below has a handle; uses by workers go by key.

    Raises ``ConfigError`` for an arena that does not hold the largest row, or an unknown policy.
    """
    def __new__(
        cls,
        /,
        arena_bytes: SupportsIndex,
        row_bytes: int | Mapping[int, int],
        *,
        align: SupportsIndex = ...,
        policy: str = ...,
        theta: float = ...,
        store_threshold: int = ...,
        tracked_keys: int = ...,
        directory: int = ...,
        protect_waiting: bool = ...,
    ) -> CpuTier: ...
    def __reduce__(self, /) -> tuple[Any, ...]: ...
    def abandon(self, /, handles: SupportsGetItem[int, SupportsIndex]) -> None:
        """Makes rows that a tier below writes absent at once.

        Their slots stay taken until ``let_go``.
        """
    def complete_load(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> None:
        """Takes one pin of a worker from each key's row."""
    def complete_store(
        self, /, keys: Iterable[bytes | bytearray | memoryview], success: bool = ...
    ) -> list[int]:
        """Ends the writing of a worker: rows become ready, or go.

        Returns the positions of the keys that became ready; keys without a row that a worker
        writes are ignored.
        """
    def flushed(self, /) -> None:
        """The workers have ended all that they were doing at the last reset."""
    def forget(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> None:
        """Forgets the rows that are ready and not in use."""
    def geometry(self, /) -> dict[str, Any]:
        """How the arena is cut.

        ``slab_bytes``, ``slabs``, ``tail_bytes``, ``align``, and per group id ``slot_bytes`` and
        ``rows``, the slots it has when all are its own.
        """
    def hold_ready(
        self, /, keys: Iterable[bytes | bytearray | memoryview]
    ) -> list[tuple[int, int] | None]:
        """Pins the rows that are ready for a tier below.

        Returns a handle and a byte offset for each, None for the others.
        """
    def let_go(self, /, handles: SupportsGetItem[int, SupportsIndex], success: bool = ...) -> None:
        """Ends uses of a tier below.

        Rows that it was writing become ready with ``success``, and go without. Handles of no use
        are ignored.
        """
    def lookup(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> list[bool | None]:
        """Which keys' rows can be loaded: True, False, or None while the row is being written.

        Neither pins a row nor counts as an access.
        """
    def prepare_load(self, /, keys: Iterable[bytes | bytearray | memoryview]) -> list[int] | None:
        """Pins all rows for a worker and counts one access.

        Returns their slots' byte offsets; None, and nothing is pinned, unless all are ready.
        """
    def prepare_store(
        self, /, keys: Iterable[bytes | bytearray | memoryview], *, below: bool = ...
    ) -> tuple[list[int], list[int], list[int], list[bytes]] | None:
        """Takes a slot for each key without a row, which is then being written.

        A worker writes it, or, with ``below``, a tier below.

        Returns the positions of these keys in ascending order, their slots' byte offsets and
        handles, and the keys whose rows made room. None when not all find a slot: then nothing has
        changed. Rows of ``keys`` that are there stay and count as accessed.
        """
    def reset(self, /) -> None:
        """Forgets every row.

        Slots in use stay taken until ``let_go``, and ``flushed`` for workers.
        """
    def stats(self, /) -> dict[str, Any]:
        """Counters and gauges, with units in their names; ``docs/STATS.md`` lists them."""

@final
class Fingerprint:
    """The blake3 digest of bytes given piece by piece."""
    def __new__(cls, /) -> Fingerprint: ...
    def hexdigest(self, /) -> str:
        """The digest of all bytes so far: 64 lower-case hexadecimal digits."""
    def update(self, /, data: bytes) -> None:
        """Adds the next bytes."""

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
class LruOrder:
    """The order of vLLM's LRU, in its place.

    ``chunks``: what is there, by key. ``kept`` and ``freed``: append a key that is to stay from now
    on, and one that may go again, as often as it was kept.
    """
    def __new__(cls, /, capacity: SupportsIndex) -> LruOrder:
        """An empty order for so many chunks."""
    def access(self, /, keys: Any, req_context: Any) -> None:
        """Gives keys their places in a request, unless they have later ones."""
    @property
    def chunks(self, /) -> Any: ...
    def evict(self, /, n: SupportsIndex, protected: Any) -> list[Any] | None:
        """Takes out exactly ``n`` keys that may go and are not protected, coldest first.

        They are returned with their chunks. Where there are fewer, none is taken out, and it
        returns ``None``.
        """
    @property
    def freed(self, /) -> Any: ...
    def insert(self, /, key: Any, chunk: Any, req_context: Any | None = None) -> None:
        """Adds a key with its chunk: the latest of all, or where the request has a place for it.

        vLLM 0.32 tells of no request.
        """
    @property
    def kept(self, /) -> Any: ...
    def remove(self, /, key: Any) -> None:
        """Forgets a key.

        Raises ``KeyError`` if it is not there.
        """
    def touch(self, /, keys: SupportsGetItem[int, Any]) -> None:
        """Makes keys, in token order, the latest ones; those that are not there are passed."""

@final
class RequestBook:
    """The requests of an offloading manager: what they look up, wait for, pin and hold.

    * ``cpu``: the CPU tier. Call its own methods that change rows only for what this one has not.
    * ``tiers``: the tiers below, in the order of asking: objects with a ``native``, which is a
      :class:`kvstrata.Tier` or has its ``lookup``.
    * ``tokens_per_chunk``: per group id, in the order of the selected groups.
    * ``answers``: what ``lookup`` returns for miss, hit, on its way, and not known yet.
    * ``sources``: what ``get_load_source`` returns for the CPU tier and for each tier below.
    * ``everywhere``: the ``load_tier_filter`` of a request that may load from every tier.
    * ``allowed``: called with the context of any other; says whether it may load from the CPU
      tier, and has a bit for each tier below.
    * ``wait_s``: seconds that a request may be told to ask again.
    * ``share``, ``request_share``: thousandths of the arena that rows on their way and held for
      requests may take in all, and for one request.

    Requests are told apart by their context objects, which are held while they live.
    """
    def __new__(
        cls,
        /,
        cpu: CpuTier,
        tiers: SupportsGetItem[int, Any],
        tokens_per_chunk: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]],
        *,
        answers: SupportsGetItem[int, Any],
        sources: SupportsGetItem[int, Any],
        everywhere: Any,
        allowed: Any,
        wait_s: SupportsFloat | SupportsIndex,
        share: SupportsIndex,
        request_share: SupportsIndex,
    ) -> RequestBook: ...
    def begin(self, /, context: Any) -> None:
        """A request has come; its context names it until ``end``."""
    def complete_load(self, /, keys: Any) -> list[bytes]:
        """Lets rows go that the workers have loaded.

        Returns refused keys whose rows are gone now.
        """
    def complete_store(self, /, keys: Any, context: Any, success: bool = ...) -> list[bytes]:
        """Ends stores of a worker; refused rows go.

        Returns the keys that became ready, group by group in the order of the prompt.
        """
    def end(self, /, context: Any, output_tokens: SupportsIndex | None = None) -> None:
        """A request has ended: what it pinned, holds and waits for goes."""
    def end_step(
        self, /, now: SupportsFloat | SupportsIndex
    ) -> tuple[
        list[tuple[int, tuple[tuple[bytes, ...], tuple[int, ...], tuple[int, ...], int]]],
        list[bytes],
        bytes | None,
    ]:
        """Ends a step at ``now`` seconds of a clock that never goes back.

        Returns the loads to start, each with its tier's number; keys that made room; and a key that
        was waited for too long, if any.
        """
    def get_load_source(self, /, key: Any, context: Any) -> Any | None:
        """One of ``sources``: the tier that gave a row while this request waited for it."""
    def hold(self, /, keys: Any) -> tuple[tuple[bytes, ...], tuple[int, ...], tuple[int, ...], int]:
        """Pins the rows that are ready for a tier below to read them: a job."""
    def is_pending(self, /) -> bool:
        """Whether rows wait to be loaded from below, or are being loaded."""
    def load_ended(
        self,
        /,
        keys: Any,
        handles: SupportsGetItem[int, SupportsIndex],
        lost: SupportsGetItem[int, SupportsIndex],
        busy: SupportsGetItem[int, SupportsIndex],
    ) -> list[bytes]:
        """A load from below has ended.

        ``lost`` are positions of rows that did not come, ``busy`` those of them whose slots the
        machine may still write to: they stay taken until ``let_go`` of the CPU tier. Returns the
        keys whose rows are there now.
        """
    def lookup(self, /, key: Any, context: Any) -> Any:
        """What there is of a key for a request: one of ``answers``.

        Never raises for a key of bytes.
        """
    def observe(
        self,
        /,
        context: Any,
        groups: SupportsGetItem[int, Iterable[bytes | bytearray | memoryview]],
        now: SupportsFloat | SupportsIndex,
        *,
        prompt_tokens: SupportsIndex | None = None,
        new_tokens: SupportsIndex | None = None,
        hint: str | None = None,
    ) -> None:
        """A request has arrived: its one access to its keys, whichever of them are there.

        ``groups`` has all its keys, group by group in the order of the prompt; the rest is as for
        ``Tier.observe``. ``now`` is as for ``end_step``. A context that was not begun is ignored.
        """
    def preempted(self, /, context: Any) -> None:
        """A request was taken out of the batch, and waits to run again."""
    def prepare_load(
        self, /, keys: Any, context: Any
    ) -> tuple[tuple[bytes, ...], bytes, bytes, bytes] | None:
        """Pins rows for a worker, and lets what the request pinned and held go.

        Returns keys, and places of groups (int32), chunks (int64) and offsets (int64) as bytes;
        None, and nothing is pinned, unless all rows are ready.
        """
    def prepare_store(
        self, /, keys: Any, context: Any
    ) -> tuple[list[Any], tuple[tuple[bytes, ...], bytes, bytes, bytes], list[bytes]] | None:
        """Takes slots for the keys that have none.

        Returns the keys to store as a list, what ``prepare_load`` returns of them, and the keys
        that made room. None where there is no room for all: then nothing has changed.
        """
    def refuse(self, /, keys: Any) -> None:
        """Some worker did not copy these rows: they are misses from now on."""
    def reset(self, /) -> None:
        """Forgets every row, and what requests know of rows."""
    def scheduled(self, /, context: Any) -> None:
        """A request runs: it waits for nothing any more."""
    def stats(self, /) -> dict[str, Any]:
        """Counters and gauges: rows wanted, queued, loading and held, and requests that wait."""
    def stop(self, /) -> None:
        """Answers misses and stores nothing from now on."""

@final
class Tier:
    """A storage tier on a directory or a bucket; made by :func:`kvstrata.open_tier`.

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
        """What was found out about the directory or bucket when it was opened."""
    def close(self, /, timeout_s: float = ...) -> None:
        """Closes the tier and gives the arena back, within ``timeout_s`` seconds.

        Raises ``BusyError`` only while the kernel still owns bytes of the arena; call it again
        then. After success it does nothing. A forked child is refused, as by every method: the tier
        is its parent's. Leaving a ``with`` block there closes nothing.
        """
    def drain(self, /) -> None:
        """Blocks without limit until no operation touches the arena; results stay to be polled."""
    def fileno(self, /) -> int:
        """An eventfd that is readable while results wait to be polled. It belongs to the tier."""
    def finish(self, /, request_id: str, output_tokens: SupportsIndex | None) -> None:
        """An observed request has ended with a response of so many tokens; ``None`` if not known.

        One that is not open is ignored.
        """
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
    def observe(
        self,
        /,
        request_id: str,
        keys: Iterable[bytes | bytearray | memoryview],
        *,
        prompt_tokens: SupportsIndex | None,
        new_tokens: SupportsIndex | None,
        hint: str | None = None,
    ) -> None:
        """A request has arrived: its one access to its keys, whichever of them are here.

        * ``request_id``: any text that no other open request has; one that is open changes nothing.
        * ``keys``: all its keys in token order, found or not.
        * ``prompt_tokens``: tokens of its prompt, ``None`` if not known.
        * ``new_tokens``: those of them that no earlier request had, ``None`` if not known.
        * ``hint``: ``"tool_use"`` or ``"end_of_turn"``: what follows, if the caller knows.

        Loads and touches of its keys do not count again until ``finish``, and its rows go last.
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
        """Counters and gauges, with units in their names; ``docs/STATS.md`` lists them."""
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

@final
class Trace:
    """A request trace in memory."""
    def __new__(cls, /, text: bytes) -> Trace:
        """Reads a trace from the bytes of its lines.

        Raises ``ArgumentError``, with the number of the line, for anything that is not a trace.
        """
    @property
    def block_tokens(self, /) -> int:
        """Tokens of a block."""
    @property
    def name(self, /) -> str | None:
        """The name in its header, if any."""
    def optimum(self, /, capacity: SupportsIndex) -> int:
        """Blocks that the best cache of so many blocks would have found."""
    def paths(self, /) -> list[list[int]]:
        """The blocks of each request, numbered from 0 in the order of first use."""
    def replay(
        self,
        /,
        policy: str,
        capacity: SupportsIndex,
        *,
        theta: float = ...,
        gpu_blocks: SupportsIndex = ...,
        below_policy: str | None = None,
        below_capacity: SupportsIndex = ...,
        below_theta: float = ...,
        store_threshold: SupportsIndex = ...,
        directory: SupportsIndex | None = None,
        head_untold: bool = ...,
        told_late: bool = ...,
        each: Any | None = None,
    ) -> Any:
        """Replays the trace; returns counts by name.

        ``each``, if a list, is given the number of blocks that each request found in the tier.

        Raises ``ConfigError`` for a policy that is not known, ``ArgumentError`` for a tier of no
        blocks, and for what is out of range.
        """
    @property
    def requested(self, /) -> int:
        """Number of blocks that all requests ask for."""
    @property
    def requests(self, /) -> int:
        """Number of requests."""
    @property
    def unique_blocks(self, /) -> int:
        """Number of different blocks."""

def collect_garbage(
    url: str | PathLike[str],
    *,
    capacity: str | int = ...,
    older_than_s: float = ...,
    dry_run: bool = ...,
    deadline_s: float = ...,
    time_limit_s: float = ...,
    endpoint: str = ...,
    region: str = ...,
    addressing: str = ...,
    allow_http: bool = ...,
    ca_bundle: str = ...,
) -> dict[str, Any]:
    """Removes rows from a bucket: whole idle namespaces first, then the oldest rows.

    * ``url``, ``endpoint``, ``region``, ``addressing``, ``allow_http``, ``ca_bundle``: as for
      ``open_tier``, of a bucket.
    * ``capacity``: bytes of rows to leave: ``"10GiB"`` or an int.
    * ``older_than_s``: rows that were stored longer ago than so many seconds go.
    * ``dry_run``: nothing is removed, the report is as if.
    * ``deadline_s``: longest time of one request, or of all attempts at a page of a listing.
    * ``time_limit_s``: longest time of all; what is not done by then is not.

    Engines may go on meanwhile. Returns ``removed_rows``, ``removed_bytes``, ``failed_rows``,
    ``last_error``, ``kept_rows``, ``kept_bytes``, ``emptied``: names of namespaces without rows,
    ``odd_names``: objects that are nobody's, and ``ended``: ``"done"``, ``"time limit"`` or
    ``"not listed to the end"``. Raises ``ConfigError`` (also a ``ValueError``) when it cannot; what
    a signal's handler raises, such as ``KeyboardInterrupt``, has what was done so far as its
    attribute ``report``.
    """

def manifest_differences(
    a: dict[str, Any], b: dict[str, Any]
) -> list[tuple[str, str | None, str | None]]:
    """The fields in which two whole manifests differ: path, canonical text in ``a``, and in ``b``.

    ``None`` stands for a field that is absent. Empty exactly when the digests are equal. Raises
    ``ConfigError`` for what cannot be a manifest.
    """

def manifest_digest(manifest: dict[str, Any]) -> str:
    """The digest of a whole manifest as ``namespace.json`` has it: 64 hexadecimal digits.

    Raises ``ConfigError`` for what cannot be a manifest.
    """

def open_tier(
    url: str | PathLike[str],
    *,
    manifest: dict[str, Any],
    row_bytes: int | Mapping[int, int],
    arena: WriteableBuffer,
    capacity: str | int = ...,
    min_free: str | int = ...,
    policy: str = ...,
    io_backend: str = ...,
    deadline_s: float = ...,
    share_mode: str = ...,
    required: bool = ...,
    honours_busy: bool = ...,
    theta: float = ...,
    store_threshold: int = ...,
    tracked_keys: int = ...,
    directory: int = ...,
    endpoint: str = ...,
    region: str = ...,
    addressing: str = ...,
    allow_http: bool = ...,
    ca_bundle: str = ...,
    requests_max: int = ...,
    in_flight_max: str | int = ...,
    lookup_wait_s: float = ...,
    found_s: float = ...,
    absent_s: float = ...,
) -> Tier:
    """Opens a tier on a directory or a bucket.

    * ``url``: ``file:///var/kv`` or a path: the directory is created if it is missing.
      ``s3://bucket/prefix``, ``gs://...``, ``az://...``: a bucket that exists. ``memory://name``:
      objects in this process, for tests.
    * ``manifest``: identity fields, any JSON values. ``"model"`` (str, required) names the
      directory. Format version, group ids and ``row_bytes`` are added. Rows are only ever shared
      between tiers whose whole manifests are equal.
    * ``row_bytes``: payload bytes of a row per group id; an int ``n`` is short for ``{0: n}``.
    * ``arena``: writable, C-contiguous buffer that holds the slots, one row of each group at least.
      The tier keeps it until it is closed: until then it can be neither freed nor resized.
    * ``deadline_s``: seconds after which an operation counts as failed; 30.0.
    * ``required``: False gives, where the directory or bucket cannot be used, a tier that misses
      and retries by itself.
    * ``honours_busy``: False: a result comes only when every operation on the job's slots has
      ended; on a mount whose calls can hang, loads go through buffers, so that they end at their
      deadline all the same. True: a load may end at its deadline with ``busy`` positions, and the
      caller does not reuse those slots while ``busy_offsets()`` names them.
    * ``theta``: rows that are less likely than that to be used again within an hour are not stored;
      0.05. Nothing is known before requests were observed, and then everything is stored.
      ``store_threshold``: requests that must have had a key before its row is stored; 1. It is
      counted for ``tracked_keys`` keys; 64,000. Such stores end as ``"dropped"``.
    * ``directory``: keys that what predicts this knows at most, however old; else those of the last
      hour, up to 4,194,304 or, with the policy ``"th"``, eight for each row.

    For directories alone:

    * ``capacity`` (required): bytes the tier may use: ``"10GiB"``, ``"80%"`` of the file system,
      or an int.
    * ``min_free``: bytes to leave free on the file system, in the same forms; ``"5%"``.
    * ``policy``: which rows go first when space is needed: ``"lru"``, ``"th"``, ``"arc_vllm"``,
      ``"s3fifo"``; docs/EVICTION.md defines them.
    * ``io_backend``: ``"auto"``, ``"threads"`` or ``"uring"``.
    * ``share_mode``: ``"private"``: only this user can read the rows.

    For buckets alone (credentials come from the environment, a credentials file or the instance):

    * ``endpoint``: ``http://host:port`` or ``https://host:port`` of a server that is not the
      provider's own. ``allow_http``: whether plain HTTP is fine. ``ca_bundle``: a file of PEM
      certificates to trust beside the system's.
    * ``region``: the environment's, or ``"us-east-1"``.
    * ``addressing``: ``"path"``, ``"virtual"`` or ``"auto"``: with an endpoint, path if that works.
    * ``requests_max``: requests for rows at a time; 32. ``in_flight_max``: their bytes; 256 MiB.
    * ``lookup_wait_s``: seconds for which a lookup says "not known yet" before it says no; 2.0.
      ``found_s``, ``absent_s``: seconds for which it is believed that a row is there, or is not;
      600.0 and 15.0.

    Raises ``ConfigError`` (also a ``ValueError``), which names the argument, path or field.
    """
