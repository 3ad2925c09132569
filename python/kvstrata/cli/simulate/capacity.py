"""Sizes of tiers as the command line gives them: blocks, shares of a trace, bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata import units

if TYPE_CHECKING:
    from decimal import Decimal

_BLOCKS_MAX = 1 << 62


def blocks(
    text: str, unique_blocks: int, block_bytes: int | None, option: str = "--capacity"
) -> int:
    """The blocks in ``"5%"`` of a trace's blocks, ``"400GiB"``, or ``"1000"``.

    Raises ``ValueError``, which names the option, for anything else, for bytes without
    ``block_bytes``, and for no block.
    """
    number, unit = _parse(text, option)
    if unit == "%":
        count = int(number * unique_blocks / 100)
    elif unit == "":
        count = int(number)
    else:
        if block_bytes is None:
            raise ValueError(f"{option} {text!r} is in bytes: --block-bytes is needed")
        count = int(number * units.UNITS[unit]) // block_bytes
    if count < 1:
        of = f" of the trace's {unique_blocks}" if unit == "%" else ""
        raise ValueError(f"{option} {text!r} is less than one block{of}; give a larger size")
    if count > _BLOCKS_MAX:
        raise ValueError(f"{option} {text!r} is more blocks than can be counted")
    return count


def size(text: str, option: str = "--block-bytes") -> int:
    """Bytes in ``"64KiB"`` or ``"65536"``; ``ValueError`` for anything else and for none."""
    number, unit = _parse(text, option, "64KiB or 65536")
    if unit == "%":
        raise ValueError(f"{option} {text!r} is a share; bytes are expected")
    count = int(number * units.UNITS[unit])
    if count < 1:
        raise ValueError(f"{option} {text!r} is less than one byte")
    return count


def _parse(text: str, option: str, examples: str = "5%, 400GiB or 1000") -> tuple[Decimal, str]:
    found = units.parse(text)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a size such as {examples}")
    return found
