"""Records the requests of an engine, for `kvstrata record` and `kvstrata simulate`.

Never tokens, and no hashes that somebody without the directory's salt could tell a prompt by:
:mod:`kvstrata.recording`. A thread writes; what it cannot keep up with is left out and counted.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

import kvstrata
from kvstrata import places, recording
from kvstrata.vllm import sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

logger = init_logger(__name__)

OPTION = "record"
_NAMES = ("directory", "file_size", "files")
# Blocks whose numbers one file keeps: 40 MB of memory.
BLOCKS_MAX = 1 << 18
# Blocks of requests that wait for the thread: some 90 MB of memory.
WAITING_MAX = 1 << 20
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class RecordOptions:
    """Where, and how much there may be: so many files of so many bytes, the oldest go first."""

    directory: Path
    file_bytes: int = 64 << 20
    files: int = 16

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> RecordOptions | None:
        """Read the option; `None` where nothing is recorded.

        # Errors
        :class:`kvstrata.ConfigError` naming what is wrong.
        """
        given = extra_config.get(OPTION)
        if given is None:
            return None
        if isinstance(given, str):
            given = {"directory": given}
        place = given.get("directory") if isinstance(given, dict) else None
        if not isinstance(place, str) or not place.strip():
            msg = f"{OPTION!r} is {given!r}, not a directory, nor an object with a 'directory'"
            raise kvstrata.ConfigError(msg)
        try:
            directory = places.directory(place)
        except ValueError as error:
            msg = f"{OPTION!r} is {error}"
            raise kvstrata.ConfigError(msg) from error
        if (why := places.doubt(place)) is not None:
            msg = f"{OPTION!r} is {why}"
            raise kvstrata.ConfigError(msg)
        for name in given:
            if name not in _NAMES:
                msg = f"{OPTION!r} has no {name!r}: it has {', '.join(map(repr, _NAMES))}"
                raise kvstrata.ConfigError(msg)
        files = given.get("files", cls.files)
        if isinstance(files, bool) or not isinstance(files, int) or files < 1:
            msg = f"'files' of {OPTION!r} is {files!r}, not a whole number from 1 on"
            raise kvstrata.ConfigError(msg)
        size = sizes.parse(f"file_size of {OPTION}", given.get("file_size", cls.file_bytes), 0)
        return cls(directory, size, files)


@dataclass(frozen=True)
class _Ended:
    began: float
    hashes: tuple[bytes, ...]
    output_tokens: int
    hint: str | None


class Recorder:
    """See the module. `block_tokens` are the tokens of one hash."""

    def __init__(
        self, options: RecordOptions, block_tokens: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._options = options
        self._block_tokens = block_tokens
        self._clock = clock
        try:
            self._salt = recording.prepare(options.directory)
        except (OSError, ValueError) as error:
            msg = f"{OPTION!r}: {error}"
            raise kvstrata.ConfigError(msg) from error
        # By request, which is held while it is here: its id may be given again.
        self._open: dict[int, tuple[Any, float, str | None]] = {}
        self._waiting: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        # Each is changed by one thread alone.
        self._blocks_given = self._blocks_taken = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="kvstrata-record", daemon=True)
        self._thread.start()

    def arrived(self, request: Any, hint: str | None) -> None:
        """A request of vLLM's was taken up."""
        self._open[id(request)] = (request, self._clock(), hint)

    def ended(self, request: Any) -> None:
        """It has ended. Waits for nothing."""
        known = self._open.pop(id(request), None)
        if known is None:
            return
        _, began, hint = known
        blocks = int(request.num_prompt_tokens) // self._block_tokens
        hashes = tuple(bytes(one) for one in request.block_hashes[:blocks])
        if not hashes:
            return
        waiting = self._blocks_given - self._blocks_taken
        if not self._thread.is_alive() or (waiting and waiting + len(hashes) > WAITING_MAX):
            self.lost += 1
            return
        self._blocks_given += len(hashes)
        self._waiting.put(_Ended(began, hashes, int(request.num_output_tokens), hint))

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self.lost:
            logger.warning("kvstrata: %d requests were not recorded", self.lost)

    def _run(self) -> None:
        try:
            while self._write_file():
                pass
        except OSError as error:
            logger.error("kvstrata: requests are not recorded any more: %s", error)  # noqa: TRY400

    def _write_file(self) -> bool:
        """One file, up to its size; false at the end."""
        first = self._take()
        if first is None:
            return False
        encoder = recording.Encoder(self._salt, self._block_tokens, self._clock())
        with os.fdopen(self._create(), "wb") as file:
            size = file.write(encoder.header)
            ended: _Ended | None = first
            while ended is not None:
                size += file.write(
                    encoder.request(ended.began, ended.hashes, ended.output_tokens, ended.hint)
                )
                if size >= self._options.file_bytes or encoder.blocks >= BLOCKS_MAX:
                    return True
                if self._waiting.empty():
                    file.flush()
                ended = self._take()
        return False

    def _take(self) -> _Ended | None:
        ended = self._waiting.get()
        self._blocks_taken += 0 if ended is None else len(ended.hashes)
        return ended

    def _create(self) -> int:
        # Those of earlier processes, too: names begin with the time.
        there = sorted(self._options.directory.glob(f"*{recording.SUFFIX}"))
        for oldest in there[: max(0, len(there) + 1 - self._options.files)]:
            oldest.unlink(missing_ok=True)
        made = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._clock()))
        for number in range(1 << 20):
            name = f"{made}-{os.getpid()}-{number:06d}{recording.SUFFIX}"
            path = self._options.directory / name
            try:
                return recording.create(path)
            except FileExistsError:
                continue
        msg = f"no free name in {self._options.directory}"
        raise FileExistsError(msg)
