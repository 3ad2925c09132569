from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kvstrata.cli.demo import rows

if TYPE_CHECKING:
    from pathlib import Path

ROW_BYTES = 5000
STRIDE = 8192
HASH = bytes(range(32))


def write_file(path: Path, group: int, keys: list[bytes | None], count: int = 40) -> int:
    """A row file of the format's layout; row i is filled with byte i. Returns where rows begin."""
    head = bytearray(8192)
    head[:8] = b"KVSTRATA"
    struct.pack_into("<QQII", head, 56, ROW_BYTES, STRIDE, count, group)
    table = bytearray(-(-count * 128 // 4096) * 4096)
    body = bytearray()
    for row in range(count):
        key = keys[row] if row < len(keys) else None
        if key is not None:
            table[row * 128 : row * 128 + len(key)] = key
            table[row * 128 + 68 : row * 128 + 70] = bytes([len(key), 1])
        body += bytes([row]) * STRIDE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + table + body)
    return len(head) + len(table)


def key(group: int, block_hash: bytes = HASH) -> bytes:
    return block_hash + group.to_bytes(4, "big")


def test_the_flipped_byte_lies_in_the_payload_of_the_row_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model-abc" / "rows" / "g0" / "0000000000000001.rows"
    first = write_file(path, 0, [key(0, b"x" * 32), None, key(0)])
    before = path.read_bytes()
    row = rows.row_of_block(tmp_path, HASH)
    assert row is not None
    assert (row.path, row.offset, row.length) == (path, first + 2 * STRIDE, ROW_BYTES)
    offset = rows.flip_byte(row)
    after = path.read_bytes()
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [offset]
    assert first + 2 * STRIDE <= offset < first + 2 * STRIDE + ROW_BYTES
    assert after[offset] == 2 ^ 0xFF


def test_of_several_groups_the_row_of_the_last_one_is_taken(tmp_path: Path) -> None:
    for group in (0, 3, 1):
        write_file(tmp_path / f"{group}.rows", group, [key(group)])
    row = rows.row_of_block(tmp_path, HASH)
    assert row is not None
    assert row.group == 3


def test_a_block_that_was_never_stored_has_no_row(tmp_path: Path) -> None:
    write_file(tmp_path / "0.rows", 0, [key(0, b"y" * 32)])
    assert rows.row_of_block(tmp_path, HASH) is None
    assert rows.row_of_block(tmp_path / "absent", HASH) is None


def test_a_file_that_is_no_row_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.rows").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"0\.rows is not a kvstrata row file"):
        list(rows.stored_rows(tmp_path))
