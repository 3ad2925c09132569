"""Sizes of tiers as the command line gives them: blocks, shares of a trace, bytes."""

from __future__ import annotations

import re

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", re.ASCII)


def blocks(text: str, unique_blocks: int, block_bytes: int | None) -> int:
    """The blocks in ``"5%"`` of a trace's blocks, ``"400GiB"``, or ``"1000"``.

    Raises ``ValueError`` for anything else, for bytes without ``block_bytes``, and for no block.
    """
    number, unit = _parse(text)
    if unit == "%":
        count = int(number / 100 * unique_blocks)
    elif unit == "":
        count = int(number)
    else:
        if block_bytes is None:
            raise ValueError(f"capacity {text!r} is in bytes: --block-bytes is needed")
        count = int(number * _BYTES[unit]) // block_bytes
    if count < 1:
        raise ValueError(f"capacity {text!r} is less than one block")
    return count


def size(text: str) -> int:
    """Bytes in ``"64KiB"`` or ``"65536"``; ``ValueError`` for anything else and for none."""
    number, unit = _parse(text)
    if unit == "%":
        raise ValueError(f"{text!r} is a share; bytes are expected")
    count = int(number * _BYTES[unit or "B"])
    if count < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return count


def _parse(text: str) -> tuple[float, str]:
    match = _FORM.fullmatch(text)
    unit = match[2].upper() if match else ""
    if match is None or (unit not in ("", "%") and unit not in _BYTES):
        raise ValueError(f"{text!r} is not a size; 5%, 400GiB or a number of blocks is expected")
    return float(match[1]), unit
