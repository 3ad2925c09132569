"""A process of its own: stores or loads rows and prints their outcomes."""

from __future__ import annotations

import mmap
import random
import sys

import kvstrata

ROW_BYTES = 8192


def main(url: str, endpoint: str, what: str, count: int) -> None:
    arena = mmap.mmap(-1, count * ROW_BYTES)
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(count)]
    with kvstrata.open_tier(
        url,
        manifest={"model": "m", "dtype": "bfloat16"},
        row_bytes=ROW_BYTES,
        arena=arena,
        endpoint=endpoint,
        allow_http=True,
    ) as tier:
        for slot, key in enumerate(keys):
            payload = random.Random(key).randbytes(ROW_BYTES)
            arena[slot * ROW_BYTES : (slot + 1) * ROW_BYTES] = payload
        begin = tier.store if what == "store" else tier.load
        begin(1, keys, [slot * ROW_BYTES for slot in range(count)])
        (result,) = tier.wait(40.0)
        print(*result.outcomes)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
