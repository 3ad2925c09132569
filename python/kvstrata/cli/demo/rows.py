"""Finds one stored row in a root's row files and flips one byte of it, while no engine runs.

Offsets are those of docs/FORMAT.md, version 1.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAGIC = b"KVSTRATA"
_PAGE_BYTES = 4096
_TABLE_OFFSET = 2 * _PAGE_BYTES
_ENTRY_BYTES = 128
_KEY_BYTES_MAX = 68
# Payload bytes of a row, stride of a row, number of rows.
_GEOMETRY = struct.Struct("<QQI")
_GEOMETRY_OFFSET = 56
_STATE_VALID = 1
_GROUP_BYTES = 4


@dataclasses.dataclass(frozen=True)
class StoredRow:
    """Where the payload of one key lies. Units: bytes."""

    key: bytes
    path: Path
    offset: int
    length: int

    @property
    def group(self) -> int:
        """The KV cache group in the key's last four bytes."""
        return int.from_bytes(self.key[-_GROUP_BYTES:], "big")


def stored_rows(root: Path) -> Iterator[StoredRow]:
    """Every row that some entry under `root` names, file by file.

    # Errors
    `ValueError` for a file named like a row file that does not begin like one.
    """
    for path in sorted(root.rglob("*.rows")):
        with path.open("rb") as file:
            head = file.read(_PAGE_BYTES)
            if head[: len(_MAGIC)] != _MAGIC:
                message = f"{path} is not a kvstrata row file"
                raise ValueError(message)
            row_bytes, stride, count = _GEOMETRY.unpack_from(head, _GEOMETRY_OFFSET)
            file.seek(_TABLE_OFFSET)
            table = file.read(count * _ENTRY_BYTES)
        table_pages = -(-count * _ENTRY_BYTES // _PAGE_BYTES)
        first_row = _TABLE_OFFSET + table_pages * _PAGE_BYTES
        for row in range(len(table) // _ENTRY_BYTES):
            entry = table[row * _ENTRY_BYTES : (row + 1) * _ENTRY_BYTES]
            key_length, state = entry[_KEY_BYTES_MAX], entry[_KEY_BYTES_MAX + 1]
            if state == _STATE_VALID:
                yield StoredRow(entry[:key_length], path, first_row + row * stride, row_bytes)


def row_of_block(root: Path, block_hash: bytes) -> StoredRow | None:
    """The stored row of a block: the one of its last group, where it has several."""
    found = [row for row in stored_rows(root) if row.key[:-_GROUP_BYTES] == block_hash]
    return max(found, key=lambda row: row.group, default=None)


def flip_byte(row: StoredRow) -> int:
    """Invert a byte in the middle of a row's payload; returns its offset in the file.

    It is the last byte of a little-endian float32, sign and most of the exponent: a tier that
    did not notice would hand the model a value that is wrong by many orders of magnitude.
    """
    offset = row.offset + row.length // 8 * 4 + 3
    with row.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())
    return offset
