"""Stores 10,000 rows of 64 KiB in two groups, closes, reopens, loads and compares every byte.

Usage: api_script.py WORKDIR. A plain script: it needs an installed kvstrata and the standard
library, writes about 660 MB below WORKDIR, removes them again, and uses an arena of 64 MiB.
"""

import hashlib
import mmap
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kvstrata

ROWS = 10_000
GROUPS = (0, 1)
ROW_BYTES = 64 * 1024
SLOTS = 1024
WAIT_S = 60.0

Batch = list[tuple[bytes, int]]


def key_of(number: int) -> bytes:
    block_hash = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return block_hash + GROUPS[number % len(GROUPS)].to_bytes(4, "big")


def payload_of(key: bytes) -> bytes:
    """Bytes that follow from the key, different in every 32-byte piece of every row."""
    return hashlib.shake_128(key).digest(ROW_BYTES)


def batches() -> Iterator[Batch]:
    """All keys with the offsets of their slots, one arena full at a time."""
    for start in range(0, ROWS, SLOTS):
        numbers = range(start, min(start + SLOTS, ROWS))
        yield [(key_of(number), (number - start) * ROW_BYTES) for number in numbers]


def open_tier(root: Path, arena: mmap.mmap) -> kvstrata.Tier:
    return kvstrata.open_tier(
        f"file://{root}",
        manifest={"model": "api-script", "revision": 1, "layers": [1, 2.5, None, True]},
        row_bytes=dict.fromkeys(GROUPS, ROW_BYTES),
        arena=arena,
        capacity="2GiB",
        min_free="1%",
    )


def finished(tier: kvstrata.Tier, job_id: int) -> None:
    """Waits for the job and insists that every key of it ended well."""
    results = tier.wait(WAIT_S)
    if [result.job_id for result in results] != [job_id]:
        sys.exit(f"job {job_id}: not finished after {WAIT_S} s: {results}")
    if not results[0].success or set(results[0].outcomes) != {"ok"}:
        sys.exit(f"job {job_id} failed: {results[0].error}, outcomes {set(results[0].outcomes)}")


def store_all(root: Path, arena: mmap.mmap) -> None:
    tier = open_tier(root, arena)
    for job_id, batch in enumerate(batches()):
        keys, offsets = zip(*batch, strict=True)
        if any(tier.lookup(keys)):
            sys.exit("a key that was never stored is found")
        for key, offset in batch:
            arena[offset : offset + ROW_BYTES] = payload_of(key)
        tier.store(job_id, keys, offsets)
        finished(tier, job_id)
    tier.close()


def load_all(root: Path, arena: mmap.mmap) -> int:
    compared = 0
    tier = open_tier(root, arena)
    for job_id, batch in enumerate(batches()):
        keys, offsets = zip(*batch, strict=True)
        arena[:] = bytes(len(arena))
        if tier.lookup(keys) != [True] * len(keys):
            sys.exit("a stored key is not found after reopening")
        tier.load(job_id, keys, offsets)
        finished(tier, job_id)
        for key, offset in batch:
            if arena[offset : offset + ROW_BYTES] != payload_of(key):
                sys.exit(f"the row of key {key.hex()} came back with other bytes")
            compared += ROW_BYTES
    tier.close()
    return compared


def main(workdir: Path) -> None:
    root = workdir / "kv"
    workdir.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    arena = mmap.mmap(-1, SLOTS * ROW_BYTES)
    try:
        store_all(root, arena)
        compared = load_all(root, arena)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    arena.close()  # the tier has given the buffer back
    if compared != ROWS * ROW_BYTES:
        sys.exit(f"{compared} bytes were compared, {ROWS * ROW_BYTES} were expected")
    loaded = {name.partition(".")[0] for name in sys.modules} & {"numpy", "torch", "vllm"}
    if loaded:
        sys.exit(f"kvstrata imported {loaded}")
    print(
        f"ok: {ROWS} rows of {ROW_BYTES} bytes in {len(GROUPS)} groups stored, reopened, loaded "
        f"and compared in {time.monotonic() - begun:.1f} s"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
