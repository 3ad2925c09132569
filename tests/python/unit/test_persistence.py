"""What the next process finds: rows, resets, and whatever happened to the files meanwhile."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvstrata


def refused(match: str) -> Any:
    return pytest.raises(kvstrata.ConfigError, match=match)


@pytest.fixture
def stored(bench: Any) -> list[bytes]:
    """Keys of both groups, stored by a tier that was closed."""
    keys: list[bytes] = bench.keys(range(12)) + bench.keys(range(12), group=1)
    with bench.open() as tier:
        assert bench.store(tier, keys).success
    return keys


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_rows_are_found_after_close_and_reopen(bench: Any, stored: list[bytes]) -> None:
    for _ in range(3):
        with bench.open() as tier:
            assert tier.lookup(stored) == [True] * len(stored)
            assert bench.load(tier, stored).outcomes == ["ok"] * len(stored)
            assert bench.holds(stored)
            assert bench.store(tier, stored, version=1).outcomes == ["present"] * len(stored)


def test_removed_rows_stay_removed(bench: Any, stored: list[bytes]) -> None:
    with bench.open() as tier:
        tier.remove(stored[:5])
    with bench.open() as tier:
        assert tier.lookup(stored) == [False] * 5 + [True] * (len(stored) - 5)


def test_a_reset_survives_reopening(bench: Any, stored: list[bytes]) -> None:
    with bench.open() as tier:
        assert tier.reset() is True
        assert bench.store(tier, stored[:2], version=1).outcomes == ["ok", "ok"]
    with bench.open() as tier:
        assert tier.lookup(stored) == [True] * 2 + [False] * (len(stored) - 2)
        assert bench.load(tier, stored[:2]).success
        assert bench.holds(stored[:2], version=1)


def test_a_flipped_byte_is_corrupt_then_absent_until_stored_again(
    bench: Any, stored: list[bytes]
) -> None:
    flip(*bench.find(bench.payload(stored[3])))
    with bench.open() as tier:
        assert tier.lookup(stored[3:5]) == [True, True]
        loaded = bench.load(tier, stored[2:5])
        assert loaded.outcomes == ["ok", "corrupt", "ok"]
        assert not loaded.success
        assert loaded.error
        assert tier.lookup(stored[2:5]) == [True, False, True]
        again = bench.store(tier, stored[3:4])
        assert again.outcomes == ["ok"]
        assert tier.lookup(stored[3:4]) == [True]
        assert bench.load(tier, stored[3:4]).success
        assert bench.holds(stored[3:4])
        assert tier.stats()["load_outcomes"]["corrupt"] == 1


def test_one_rows_bytes_in_the_place_of_another_are_never_loaded(
    bench: Any, stored: list[bytes]
) -> None:
    path, place = bench.find(bench.payload(stored[3]))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bench.payload(stored[4]))
    with bench.open() as tier:
        assert bench.load(tier, stored[3:4]).outcomes == ["corrupt"]


def test_a_row_cut_off_at_the_end_of_its_file_misses_and_heals(
    bench: Any, stored: list[bytes]
) -> None:
    path, place = bench.find(bench.payload(stored[7]))
    tier = bench.open()
    os.truncate(path, place + 100)
    loaded = bench.load(tier, stored[7:8])
    assert loaded.outcomes[0] in {"miss", "corrupt", "io_error"}
    assert tier.lookup(stored[7:8]) == [False]
    assert bench.store(tier, stored[7:8]).outcomes == ["ok"]
    assert bench.load(tier, stored[7:8]).success
    assert bench.holds(stored[7:8])


@pytest.mark.parametrize("length", [0, 100, 4096, 9000, 20_000])
def test_a_file_cut_while_no_tier_was_open_costs_only_its_rows(
    bench: Any, stored: list[bytes], length: int
) -> None:
    path, _ = bench.find(bench.payload(stored[0]))
    os.truncate(path, length)
    with bench.open() as tier:
        loaded = bench.load(tier, stored)
        assert loaded.outcomes[12:] == ["ok"] * 12
        for key, offset, outcome in zip(
            stored, bench.offsets(stored), loaded.outcomes, strict=True
        ):
            assert outcome != "ok" or bench.slot(key, offset) == bench.payload(key)
        lost = [k for k, o in zip(stored, loaded.outcomes, strict=True) if o != "ok"]
        assert lost
        assert tier.lookup(lost) == [False] * len(lost)
        assert bench.store(tier, lost).success
    with bench.open() as tier:
        assert bench.load(tier, stored).success
        assert bench.holds(stored)


def test_a_file_that_vanished_under_an_open_tier_misses_and_heals(
    bench: Any, stored: list[bytes]
) -> None:
    tier = bench.open()
    path, _ = bench.find(bench.payload(stored[0]))
    path.unlink()
    loaded = bench.load(tier, stored)
    for key, offset, outcome in zip(stored, bench.offsets(stored), loaded.outcomes, strict=True):
        assert outcome != "ok" or bench.slot(key, offset) == bench.payload(key)
    lost = [k for k, o in zip(stored, loaded.outcomes, strict=True) if o != "ok"]
    assert tier.lookup(lost) == [False] * len(lost)

    def healed() -> bool:
        return bool(bench.store(tier, stored).success and bench.load(tier, stored).success)

    assert bench.eventually(healed)
    assert bench.holds(stored)


def test_all_files_gone_under_an_open_tier_raises_nothing(bench: Any, stored: list[bytes]) -> None:
    tier = bench.open()
    shutil.rmtree(bench.namespace())
    for _ in range(3):
        bench.load(tier, stored)
        bench.store(tier, stored)
        bench.store(tier, bench.keys(range(50, 60)))
        tier.remove(stored[:2])
        tier.touch(stored)
        tier.reset()
    assert tier.lookup(stored[:2]) in ([False, False], [True, True])
    tier.close()
    keys = bench.keys([1])
    with bench.open() as tier:
        assert bench.store(tier, keys).success
        assert bench.load(tier, keys).success


def test_junk_in_the_directory_is_left_out(bench: Any, stored: list[bytes]) -> None:
    namespace = bench.namespace()
    [folder] = {path.parent for path in bench.row_files() if "g0" in str(path.parent)} or {
        bench.row_files()[0].parent
    }
    (folder / "0123456789abcdef.rows").write_bytes(os.urandom(50_000))
    (folder / "fedcba9876543210.rows").write_bytes(b"")
    (folder / "notes.txt").write_text("hello")
    (folder / "aaaaaaaaaaaaaaaa.rows").mkdir()
    (folder / "bbbbbbbbbbbbbbbb.rows").symlink_to("/etc/passwd")
    os.mkfifo(folder / "cccccccccccccccc.rows")
    copy = folder / "dddddddddddddddd.rows"
    shutil.copy(bench.row_files()[0], copy)
    (namespace / "rows" / "stray").write_text("x")
    (namespace / "stray").mkdir()
    (bench.root / "stray").write_text("x")
    (bench.root / "other-directory").mkdir()
    with bench.open() as tier:
        assert tier.lookup(stored) == [True] * len(stored)
        assert bench.load(tier, stored).success
        assert bench.holds(stored)
        assert bench.store(tier, bench.keys(range(100, 120))).success
        assert tier.stats()["junk"] >= 3
    assert (bench.root / "stray").read_text() == "x"


def test_a_row_table_of_noise_yields_no_wrong_row(bench: Any, stored: list[bytes]) -> None:
    path, _ = bench.find(bench.payload(stored[0]))
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(4096))
    with bench.open() as tier:
        loaded = bench.load(tier, stored)
        for key, offset, outcome in zip(
            stored, bench.offsets(stored), loaded.outcomes, strict=True
        ):
            assert outcome != "ok" or bench.slot(key, offset) == bench.payload(key)


def rewritten(bench: Any, change: Any) -> Path:
    """`namespace.json` after `change` was made to what it says."""
    path: Path = bench.namespace() / "namespace.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_an_edited_manifest_is_refused_with_its_path(bench: Any, stored: list[bytes]) -> None:
    def change(content: Any) -> None:
        content["manifest"]["dtype"] = "float16"

    path = rewritten(bench, change)
    with refused(f"(?s){path}"):
        bench.open()


def test_a_consistent_manifest_of_something_else_is_refused_by_field(
    bench: Any, stored: list[bytes]
) -> None:
    other = bench.root.with_name("other")
    bench.open(url=other, manifest={"model": "test/model", "dtype": "float32"}).close()
    [source] = other.glob("*/namespace.json")
    path = bench.namespace() / "namespace.json"
    shutil.copy(source, path)
    with refused(f"(?s){path}"):
        bench.open()


@pytest.mark.parametrize("length", [0, 1, 50])
def test_a_cut_manifest_is_refused_with_its_path(
    bench: Any, stored: list[bytes], length: int
) -> None:
    path = bench.namespace() / "namespace.json"
    os.truncate(path, length)
    with refused(f"(?s){path}"):
        bench.open()


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"digest": 5}', "not json", "[" * 5000])
def test_a_manifest_that_someone_put_there_is_refused_with_its_path(
    bench: Any, stored: list[bytes], content: str
) -> None:
    path = bench.namespace() / "namespace.json"
    path.write_text(content)
    with refused(f"(?s){path}"):
        bench.open()


def test_a_namespace_of_a_newer_format_is_refused_as_such(bench: Any, stored: list[bytes]) -> None:
    def change(content: Any) -> None:
        content["manifest"]["format_version"] = 999

    path = rewritten(bench, change)
    with refused(f"(?s){path}.*new|new.*{path}"):
        bench.open()


def test_a_directory_that_is_full_of_rows_evicts_the_oldest(bench: Any) -> None:
    with bench.open(row_bytes=8192, capacity=1 << 20) as tier:
        for start in range(0, 400, 40):
            stored = bench.store(tier, bench.keys(range(start, start + 40)))
            assert set(stored.outcomes) <= {"ok", "no_space"}
            assert "ok" in stored.outcomes
        found = tier.lookup(bench.keys(range(400)))
        assert not any(found[:40])
        assert any(found[360:])
        there = [key for key, hit in zip(bench.keys(range(400)), found, strict=True) if hit]
        for start in range(0, len(there), 64):
            part = there[start : start + 64]
            assert bench.load(tier, part).success
            assert bench.holds(part)
    used = sum(p.stat().st_blocks * 512 for p in bench.root.rglob("*") if p.is_file())
    assert used <= 1 << 20


def test_a_loaded_or_touched_row_outlives_an_older_access(bench: Any) -> None:
    with bench.open(row_bytes=8192, capacity=1 << 20) as tier:
        keep = bench.keys(range(8))
        bench.store(tier, keep)
        for start in range(100, 600, 10):
            bench.store(tier, bench.keys(range(start, start + 10)))
            tier.touch(keep[:4])
            assert bench.load(tier, keep[4:]).outcomes == ["ok"] * 4
        assert tier.lookup(keep) == [True] * 8
