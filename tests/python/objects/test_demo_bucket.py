"""What `kvstrata demo --tier s3` does to a bucket, beside the tier itself."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import kvstrata
from kvstrata.cli.demo import bucket as demo
from kvstrata.cli.demo.place import Place

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROW_BYTES = 4096
MANIFEST = {"model": "m", "dtype": "float32"}
HASH = b"h" * 32


def open_tier(bucket: demo.Bucket, arena: mmap.mmap) -> Any:
    return kvstrata.open_tier(
        bucket.url,
        manifest=MANIFEST,
        row_bytes={0: ROW_BYTES, 1: ROW_BYTES},
        arena=arena,
        endpoint=bucket.endpoint,
        allow_http=True,
        addressing="path",
    )


def run(tier: Any, begin: Any, keys: list[bytes]) -> list[str]:
    begin(1, keys, [slot * ROW_BYTES for slot in range(len(keys))])
    (result,) = tier.wait(30.0)
    return list(result.outcomes)


def test_a_row_whose_byte_was_flipped_in_the_demos_own_server_is_corrupt_and_no_other(
    weed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "somebodys-own")
    assert "AWS_SESSION_TOKEN" not in demo.environment()
    root = tmp_path / "root"
    (root / "namespace").mkdir(parents=True)
    (root / "namespace" / "a.rows").write_bytes(b"x")
    said: list[str] = []
    keys = [HASH + bytes(4), HASH + bytes(3) + b"\1", b"i" * 32 + bytes(4)]
    arena = mmap.mmap(-1, 3 * ROW_BYTES)
    arena[:] = bytes(range(256)) * (3 * ROW_BYTES // 256)
    with demo.serving(weed, tmp_path / "weed", said.append) as bucket:
        place = Place(root, bucket)
        assert said == [f"SeaweedFS serves {bucket.endpoint}"]
        assert place.flip(HASH) is None
        with open_tier(bucket, arena) as tier:
            assert run(tier, tier.store, keys) == ["ok"] * 3
            assert set(bucket.rows()) == set(keys)
        flipped = place.flip(HASH)
        assert flipped is not None
        assert (flipped["group"], flipped["offset"]) == (1, 256 + ROW_BYTES // 2 + 3)
        assert flipped["file"] == bucket.rows()[keys[1]]
        assert place.wipe() == 1
        assert list(root.iterdir()) == []
        with open_tier(bucket, arena) as tier:
            assert run(tier, tier.load, keys) == ["ok", "corrupt", "ok"]
    arena.close()


def test_a_place_without_a_bucket_keeps_its_directory(tmp_path: Path) -> None:
    (tmp_path / "a.rows").write_bytes(b"x")
    place = Place(tmp_path)
    assert place.wipe() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.rows"]
    assert place.words == "disk"
