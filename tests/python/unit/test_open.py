"""What `open_tier` refuses: one error that names the argument, path or field."""

import array
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import kvstrata


def refused(match: str) -> Any:
    return pytest.raises(kvstrata.ConfigError, match=match)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def test_a_config_error_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(kvstrata.ConfigError, ValueError)
    for name in ("ConfigError", "ClosedError", "BusyError"):
        assert issubclass(getattr(kvstrata, name), kvstrata.KVStrataError)
    assert not issubclass(kvstrata.KVStrataError, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", None),
        ("capacity", -1),
        ("capacity", True),
        ("capacity", 1.5),
        ("capacity", ""),
        ("capacity", "ten"),
        ("capacity", "10 apples"),
        ("capacity", "-5GiB"),
        ("capacity", "120%"),
        ("capacity", 0),
        ("min_free", "lots"),
        ("min_free", None),
        ("min_free", "101%"),
        ("policy", "newest"),
        ("policy", None),
        ("io_backend", "carrier-pigeon"),
        ("io_backend", 1),
        ("deadline_s", -1),
        ("deadline_s", 0),
        ("deadline_s", float("nan")),
        ("deadline_s", "soon"),
        ("share_mode", "everybody"),
        ("share_mode", None),
        ("required", "yes"),
        ("honours_busy", 1),
        ("row_bytes", 0),
        ("row_bytes", -1),
        ("row_bytes", True),
        ("row_bytes", 2**40),
        ("row_bytes", {}),
        ("row_bytes", {"0": 4096}),
        ("row_bytes", {0: 4096.0}),
        ("row_bytes", {-1: 4096}),
        ("row_bytes", {2**32: 4096}),
        ("row_bytes", [4096]),
        ("manifest", None),
        ("manifest", []),
        ("manifest", {}),
        ("manifest", {"model": ""}),
        ("manifest", {"model": 5}),
        ("manifest", {"model": "m", 1: "x"}),
        ("manifest", {"model": "m", "x": float("inf")}),
        ("manifest", {"model": "m", "x": 2**64}),
        ("manifest", {"model": "m", "x": {1, 2}}),
        ("manifest", {"model": "m", "x": b"bytes"}),
        ("manifest", {"model": "m", "x": "\udc80"}),
        ("manifest", {"model": "m", "x": nested(100)}),
        ("manifest", {"model": "m", "x": CYCLE}),
        ("manifest", {"model": "m", "x": list(range(100_000))}),
        ("url", ""),
        ("url", 5),
        ("url", None),
        ("url", "ftp://somewhere/kv"),
        ("url", "file://host/kv"),
        ("url", "~/kv"),
        ("url", "file:/var/kv"),
        ("url", " /var/kv"),
        ("url", "/tmp/nul\0byte"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_option_is_refused_by_its_name(bench: Any, name: str, value: object) -> None:
    with refused(name):
        bench.open(**{name: value})
    assert not bench.root.exists() or list(bench.root.glob("*/*")) == []


@pytest.mark.parametrize("field", ["format_version", "row_bytes"])
def test_fields_that_we_add_to_the_manifest_cannot_be_given(bench: Any, field: str) -> None:
    with refused(field):
        bench.open(manifest={"model": "m", field: 1})


@pytest.mark.parametrize(
    ("arena", "reason"),
    [
        (bytes(8192), "read-only"),
        (memoryview(bytearray(8192)).toreadonly(), "read-only"),
        (memoryview(bytearray(16384))[::2], "contiguous"),
        (memoryview(bytearray(8192))[::-1], "contiguous"),
        (bytearray(), "empty"),
        ([0] * 8192, "buffer"),
        (None, "buffer"),
        (4096, "buffer"),
    ],
    ids=["bytes", "readonly", "strided", "reversed", "empty", "list", "None", "int"],
)
def test_a_buffer_of_the_wrong_kind_is_refused(bench: Any, arena: object, reason: str) -> None:
    with refused(f"arena.*{reason}"):
        bench.open(arena=arena)


def test_any_writable_contiguous_buffer_is_an_arena(bench: Any) -> None:
    import ctypes

    signed = memoryview(bytearray(16384)).cast("b")
    square = memoryview(bytearray(16384)).cast("B", [128, 128])
    doubles = array.array("d", [0.0] * 2048)
    for arena in (bytearray(16384), signed, square, doubles, (ctypes.c_int * 4096)()):
        view = memoryview(arena).cast("B")
        with bench.open(arena=arena) as tier:
            key = bench.key(1)
            view[:8192] = bench.payload(key)
            tier.store(1, [key], [0])
            assert bench.wait(tier, 1).success
            tier.load(2, [key], [8192])
            assert bench.wait(tier, 2).success
            assert bytes(view[8192:]) == bench.payload(key)


def test_a_numpy_array_is_an_arena(bench: Any) -> None:
    numpy = pytest.importorskip("numpy")
    arena = numpy.zeros((4, 4096), numpy.float16)
    tier = bench.open(arena=arena)
    tier.store(numpy.int64(1), bench.keys([1, 2]), numpy.array([0, 8192], numpy.int64))
    assert bench.wait(tier, 1).success
    tier.load(2, bench.keys([1, 2]), numpy.array([8192, 16384], numpy.uint32))
    assert bench.wait(tier, 2).success
    with pytest.raises(kvstrata.ConfigError, match=r"arena.*contiguous"):
        bench.open(arena=numpy.zeros((64, 64), numpy.int8).T, url=bench.root.with_name("other"))


def test_options_can_be_given_in_every_form_they_have(bench: Any) -> None:
    root = bench.root
    for url in (str(root), root, f"file://{root}"):
        bench.open(url=url).close()
    for capacity in ("64MiB", "0.5GiB", "1G", "50%", 64 << 20):
        bench.open(capacity=capacity).close()
    bench.open(row_bytes=8192).close()
    bench.open(row_bytes={0: 8192}).close()
    assert len(list(root.glob("*/namespace.json"))) == 2


def test_an_int_as_row_bytes_is_short_for_group_0(bench: Any) -> None:
    keys = bench.keys([1])
    with bench.open(row_bytes=8192) as tier:
        bench.store(tier, keys)
    with bench.open(row_bytes={0: 8192}) as tier:
        assert tier.lookup(keys) == [True]


def test_the_manifest_takes_every_json_value_and_tells_them_apart(bench: Any) -> None:
    values = [None, True, 1, 1.0, "1", [1], {"a": 1}, -(2**63), 2**64 - 1, "é\n\0", [[], {}]]
    for value in values:
        bench.open(manifest={"model": "m", "x": value}).close()
    written = [json.loads(path.read_text()) for path in bench.root.glob("*/namespace.json")]
    assert len(written) == len(values)


def test_another_manifest_finds_none_of_the_rows(bench: Any) -> None:
    keys = bench.keys([1])
    with bench.open() as tier:
        bench.store(tier, keys)
    with bench.open(manifest={"model": "test/model", "dtype": "float16"}) as tier:
        assert tier.lookup(keys) == [False]


def test_files_are_private_whatever_the_umask(bench: Any) -> None:
    before = os.umask(0)
    try:
        with bench.open() as tier:
            bench.store(tier, bench.keys([1]))
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [bench.root, *bench.root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_root_that_cannot_be_created_is_named(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused(str(tmp_path / "file")):
        bench.open(url=tmp_path / "file" / "kv")
    with refused(str(tmp_path / "file")):
        bench.open(url=tmp_path / "file")
    with refused("/proc/"):
        bench.open(url="/proc/no/such/place")


def test_a_root_that_others_may_write_is_refused(bench: Any, tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o1777):
        root = tmp_path / oct(mode)
        root.mkdir()
        root.chmod(mode)
        with refused(str(root)):
            bench.open(url=root)


def test_a_root_of_another_user_is_refused(bench: Any, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    root = tmp_path / "theirs"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with refused(str(root)):
        bench.open(url=root)


def test_a_symbolic_link_is_no_root(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with refused(str(tmp_path / "link")):
        bench.open(url=tmp_path / "link")


@pytest.mark.parametrize("capacity", [1, 8191, 12 * 1024])
def test_a_capacity_smaller_than_a_row_of_each_group_is_refused(bench: Any, capacity: int) -> None:
    with refused("capacity"):
        bench.open(capacity=capacity)


def test_an_arena_smaller_than_the_largest_row_is_refused(bench: Any) -> None:
    for length in (100, 5000, 8191):
        with refused(f"^arena: {length} bytes hold no row of group 0, which has 8192 bytes$"):
            bench.open(arena=bytearray(length))
    assert not bench.root.exists() or list(bench.root.iterdir()) == []
    bench.open(arena=bytearray(8192))


def test_a_second_tier_on_the_same_root_is_refused_and_told_who_holds_it(bench: Any) -> None:
    tier = bench.open()
    with refused(f"(?s){bench.root}.*{os.getpid()}"):
        bench.open()
    bench.store(tier, bench.keys([1]))
    tier.close()
    assert bench.open().lookup(bench.keys([1])) == [True]


def test_a_root_that_is_not_required_gives_a_tier_that_misses_and_retries(
    bench: Any, tmp_path: Path
) -> None:
    blocker = tmp_path / "blocked"
    blocker.write_text("in the way")
    tier = bench.open(url=blocker / "kv", required=False)
    keys = bench.keys([1])
    assert tier.lookup(keys) == [False]
    assert bench.load(tier, keys).outcomes == ["miss"]
    assert not bench.store(tier, keys).success
    assert tier.busy_offsets() == []
    tier.touch(keys)
    tier.remove(keys)
    assert isinstance(tier.stats(), dict)
    assert isinstance(tier.capabilities(), dict)
    tier.drain()
    blocker.unlink()

    assert bench.eventually(lambda: bench.store(tier, keys).success, within_s=45.0)
    assert bench.load(tier, keys).success
    assert bench.holds(keys)


def test_wrong_options_are_refused_even_where_the_root_is_not_required(bench: Any) -> None:
    with refused("policy"):
        bench.open(required=False, policy="newest")
    with refused("model"):
        bench.open(required=False, manifest={})


def test_opening_says_in_the_log_what_was_chosen(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvstrata"):
        chosen = bench.open().capabilities()
    line = f"{chosen['io_backend']} on {chosen['file_system']}: {chosen['io_mode']} I/O"
    assert any(line in record.getMessage() for record in caplog.records)
    assert {record.name for record in caplog.records} == {"kvstrata"}
