"""Recordings of engines as one trace: digests become numbers."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstrata import recording

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_DIGITS = 2 * recording.DIGEST_BYTES
# Of a request: ten million tokens in blocks of one.
_BLOCKS_MAX = 10_000_000


class UnreadableError(Exception):
    """A file that is not a recording, with the reason."""


@dataclass
class Recorded:
    """One request."""

    seconds: float
    output_tokens: int
    hint: int
    path: list[str]


@dataclass
class Recordings:
    """Requests of several files."""

    block_tokens: int | None = None
    # Of the first file: its salt's name, and its own.
    first: tuple[str | None, Path] | None = None
    requests: list[Recorded] = field(default_factory=list)
    # Lines at the ends of files that an engine was writing, or that was killed.
    torn: int = 0

    def add(self, path: Path) -> None:
        """Read one file.

        # Errors
        :class:`UnreadableError` naming the file and the line.
        """
        digests: list[str] = []
        *lines, rest = path.read_bytes().split(b"\n")
        self.torn += bool(rest)
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    self._header(value, path)
                else:
                    self.requests.append(_request(value, digests))
            except (
                *(ValueError, KeyError, TypeError, AttributeError),
                *(RecursionError, OverflowError),
            ) as error:
                msg = f"{path}: line {number} is not of a recording: {error}"
                raise UnreadableError(msg) from error

    def _header(self, value: Any, path: Path) -> None:
        tokens = int(value["block_tokens"])
        if value["format"] != recording.FORMAT:
            msg = f"format {value['format']!r}, not {recording.FORMAT!r}"
            raise ValueError(msg)
        if self.block_tokens not in (None, tokens):
            msg = f"blocks of {tokens} tokens, elsewhere of {self.block_tokens}"
            raise ValueError(msg)
        self.block_tokens = tokens
        salt, file = self.first = self.first or (value.get("salt"), path)
        if value.get("salt") != salt:
            msg = f"its salt is not that of {file}: equal blocks would look different"
            raise ValueError(msg)

    def check(self) -> None:
        """Raise :class:`UnreadableError` where nothing was recorded."""
        if not self.requests:
            msg = "no request was recorded there"
            raise UnreadableError(msg)

    def lines(self, name: str) -> Iterable[str]:
        """The trace, line by line, requests in the order of their arrival."""
        ordered = sorted(self.requests, key=lambda request: request.seconds)
        numbers: dict[str, int] = {}
        for request in ordered:
            for digest in request.path:
                numbers.setdefault(digest, len(numbers))
        yield json.dumps(
            {
                "format": "kvtrace-ranges-1",
                "name": name,
                "requests": len(ordered),
                "unique_blocks": len(numbers),
                "block_tokens": self.block_tokens,
            }
        )
        began = ordered[0].seconds if ordered else 0.0
        for request in ordered:
            runs = recording.ranges([numbers[digest] for digest in request.path])
            line = {"t": round(request.seconds - began, 3), "s": 0, "o": request.output_tokens}
            yield json.dumps({**line, "h": request.hint, "r": runs}, separators=(",", ":"))


def _request(value: Any, digests: list[str]) -> Recorded:
    fresh, runs, seconds = value["d"], value["r"], float(value["t"])
    if not isinstance(fresh, str) or not math.isfinite(seconds):
        msg = "digests that are no text, or a time that is no number"
        raise ValueError(msg)
    if len(fresh) % _DIGITS or len(runs) % 2:
        msg = "half a digest, or half a range"
        raise ValueError(msg)
    digests += [fresh[at : at + _DIGITS] for at in range(0, len(fresh), _DIGITS)]
    path: list[str] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if first < 0 or count < 1 or first + count > len(digests):
            msg = f"blocks {first} to {first + count}, of {len(digests)}"
            raise ValueError(msg)
        if len(path) + count > _BLOCKS_MAX:
            msg = f"more than {_BLOCKS_MAX} blocks in one request"
            raise ValueError(msg)
        path += digests[first : first + count]
    return Recorded(seconds, int(value["o"]), int(value["h"]), path)


def files_of(places: Iterable[Path]) -> list[Path]:
    """The recordings among files and in directories.

    # Errors
    :class:`UnreadableError` where there are none.
    """
    found: list[Path] = []
    given = list(places)
    for place in given:
        inside = sorted(place.iterdir()) if place.is_dir() else None
        named = [place] if inside is None else [p for p in inside if p.suffix == recording.SUFFIX]
        found += [path for path in named if not any(_is_same(path, other) for other in found)]
    if not found:
        where = ", ".join(map(str, given))
        msg = f"no recordings in {where} (files that end with {recording.SUFFIX})"
        raise UnreadableError(msg)
    return found


def _is_same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a trace, compressed where the name ends with .gz."""
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
