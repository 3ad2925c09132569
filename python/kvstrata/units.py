"""Sizes as people write them, by the rules of ``open_tier``."""

from __future__ import annotations

import re
from decimal import Decimal

# KB is decimal; KiB and a bare K are binary.
UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", re.ASCII)


def parse(text: str) -> tuple[Decimal, str] | None:
    """The number and the unit, in lower case or ``%``; ``None`` for what is no size."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        return None
    unit = found[2].lower()
    return (Decimal(found[1]), unit) if unit == "%" or unit in UNITS else None
