"""Recordings: which blocks the requests of an engine had, as digests, and when.

A recording is a file of JSON lines: a header, then one request a line, in the order in which they
ended: ``{"t": seconds since 1970, "o": output tokens, "h": 0 unknown, 1 tool use, 2 end of turn,
"r": [first, count, ...], "d": "digests"}``. Blocks have the numbers of this file, from 0 on in the
order of first use; ``d`` has the digests of those that are new in this line, 16 hexadecimal digits
each. A digest is keyed with the ``salt`` of its directory: without it nobody can tell whether a
prompt is in a recording, and recordings of one directory can be merged. The header says by a digest
which salt it was: digests under different salts say nothing of each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

FORMAT = "kvrecord-1"
SUFFIX = ".kvrec"
SALT = "salt"
SALT_BYTES = 32
DIGEST_BYTES = 8
_PAUSE_AFTER = 128
HINTS = {"tool_use": 1, "end_of_turn": 2}


def prepare(directory: Path) -> bytes:
    """Make the directory, readable by this user alone, and return its salt.

    Raises ``OSError`` where that cannot be done, also where others may write there.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"{directory} belongs to another user, or others may write there")
    path = directory / SALT
    try:
        # Complete under its name at once: engines may start together.
        made = directory / f".{SALT}-{os.urandom(8).hex()}"
        try:
            _write_new(made, os.urandom(SALT_BYTES))
            os.link(made, path)
        finally:
            made.unlink(missing_ok=True)
    except FileExistsError:
        pass
    salt = path.read_bytes()
    if len(salt) != SALT_BYTES:
        raise ValueError(f"{path} is not a salt of {SALT_BYTES} bytes")
    return salt


def _write_new(path: Path, content: bytes) -> None:
    with os.fdopen(create(path), "wb") as file:
        file.write(content)


def create(path: Path) -> int:
    """A descriptor of a file that this user alone can read; ``FileExistsError`` if it is there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def salt_name(salt: bytes) -> str:
    """What tells a salt from others, and does not tell it."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"kvrecord salt").hexdigest()


class Encoder:
    """Turns requests into the lines of one file."""

    def __init__(self, salt: bytes, block_tokens: int, began: float) -> None:
        self._salt = salt
        self._numbers: dict[bytes, int] = {}
        header = {"format": FORMAT, "block_tokens": block_tokens, "began": began}
        self.header = _line({**header, "salt": salt_name(salt)})

    @property
    def blocks(self) -> int:
        """Different blocks so far."""
        return len(self._numbers)

    def request(
        self, seconds: float, hashes: Iterable[bytes], output_tokens: int, hint: str | None
    ) -> bytes:
        """The line of a request with blocks of these hashes."""
        numbers, fresh = self._numbers, []
        path = []
        for at, one in enumerate(hashes, 1):
            if at % _PAUSE_AFTER == 0:
                time.sleep(0)  # gives the interpreter lock to whoever waits for it
            digest = hashlib.blake2b(one, digest_size=DIGEST_BYTES, key=self._salt).digest()
            number = numbers.get(digest)
            if number is None:
                number = numbers[digest] = len(numbers)
                fresh.append(digest.hex())
            path.append(number)
        request = {
            "t": round(seconds, 6),
            "o": output_tokens,
            "h": HINTS.get(hint or "", 0),
            "r": ranges(path),
            "d": "".join(fresh),
        }
        return _line(request)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def ranges(path: Sequence[int]) -> list[int]:
    """Numbers as first, count, first, count, ..."""
    runs: list[int] = []
    for number in path:
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return runs
