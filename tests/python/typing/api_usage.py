"""The API as a type checker sees it; `mypy --strict` reads this file, nothing runs it."""

import mmap
from pathlib import Path
from typing import Any, assert_type

import kvstrata


def usage(root: Path, arena: mmap.mmap, facts: dict[str, Any]) -> None:
    tier = kvstrata.open_tier(
        root, manifest=facts, row_bytes={0: 131072, 1: 16384}, arena=arena, capacity="10GiB"
    )
    assert_type(tier, kvstrata.Tier)
    assert_type(tier.lookup([b""]), list[bool | None])
    assert_type(tier.store(1, [b"", bytearray(), memoryview(b"")], [0]), None)
    assert_type(tier.load(2, (b"",), range(0, 10, 5)), None)
    assert_type(tier.poll(), list[kvstrata.JobResult])
    assert_type(tier.drain(), None)
    assert_type(tier.fileno(), int)
    assert_type(tier.busy_offsets(), list[int])
    assert_type(tier.touch([]), None)
    assert_type(tier.remove([]), None)
    assert_type(tier.reset(), bool)
    assert_type(tier.stats(), dict[str, Any])
    assert_type(tier.capabilities(), dict[str, Any])
    for result in tier.wait(1.5):
        assert_type(result.job_id, int)
        assert_type(result.kind, str)
        assert_type(result.success, bool)
        assert_type(result.outcomes, list[str])
        assert_type(result.busy, list[int])
        assert_type(result.bytes, int)
        assert_type(result.seconds, float)
        assert_type(result.error, str | None)
    tier.close(timeout_s=3)
    with kvstrata.open_tier(
        "file:///var/kv",
        manifest={"model": "m", "layers": [1, None, {"x": 2.5}]},
        row_bytes=4096,
        arena=bytearray(4096),
        capacity=10 << 30,
        min_free="5%",
        policy="lru",
        io_backend="auto",
        deadline_s=30.0,
        share_mode="private",
        required=True,
        honours_busy=False,
    ) as opened:
        assert_type(opened, kvstrata.Tier)


def misuse(tier: kvstrata.Tier, result: kvstrata.JobResult) -> None:
    # Each of these must be an error; mypy reports an ignore that is not needed.
    tier.store(1, ["text"], [0])  # type: ignore[list-item]
    tier.store("1", [b""], [0])  # type: ignore[arg-type]
    tier.load(1, [b""], ["0"])  # type: ignore[list-item]
    tier.wait("1")  # type: ignore[arg-type]
    result.success = True  # type: ignore[misc]
    kvstrata.open_tier("/var/kv")  # type: ignore[call-arg]
    kvstrata.open_tier(  # type: ignore[call-arg]
        "/var/kv",
        {"model": "m"},
        row_bytes=1,
        arena=bytearray(1),
        capacity=1,
    )


def errors() -> list[type[ValueError]]:
    return [kvstrata.ConfigError, kvstrata.ArgumentError]


def bases() -> list[type[kvstrata.KVStrataError]]:
    return [kvstrata.ConfigError, kvstrata.ArgumentError, kvstrata.ClosedError, kvstrata.BusyError]
