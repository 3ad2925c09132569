"""Keys of rows, as vLLM's `OffloadKey` has them: block hash bytes, then a group id.

The group id is four big-endian bytes.
"""

from __future__ import annotations

GROUP_BYTES = 4
HASH_BYTES_MIN = 16
HASH_BYTES_MAX = 64


def make_key(block_hash: bytes, group_id: int) -> bytes:
    """Join a block hash (16 to 64 bytes) and a group id; :class:`ValueError` out of range."""
    if not HASH_BYTES_MIN <= len(block_hash) <= HASH_BYTES_MAX:
        msg = f"a block hash of {len(block_hash)} bytes, not {HASH_BYTES_MIN} to {HASH_BYTES_MAX}"
        raise ValueError(msg)
    if not 0 <= group_id < 1 << 8 * GROUP_BYTES:
        msg = f"group id {group_id} does not fit {GROUP_BYTES} bytes"
        raise ValueError(msg)
    return block_hash + group_id.to_bytes(GROUP_BYTES, "big")


def block_hash_of(key: bytes) -> bytes:
    """The block hash of a key."""
    return key[:-GROUP_BYTES]


def group_id_of(key: bytes) -> int:
    """The group id of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
