"""Recordings of engines, and the traces that are made of them."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata import recording
from kvstrata._native import Trace
from kvstrata.cli import main as entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENS = 16


def hashes(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(count)]


def record(directory: Path, requests: list[tuple[float, list[bytes], int, str | None]]) -> Path:
    salt = recording.prepare(directory)
    encoder = recording.Encoder(salt, TOKENS, 0.0)
    lines = [encoder.header, *(encoder.request(*request) for request in requests)]
    path = directory / f"{len(list(directory.iterdir()))}{recording.SUFFIX}"
    path.write_bytes(b"".join(lines))
    return path


def trace_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    header, *requests = map(json.loads, text.splitlines())
    return header, requests


def test_recordings_of_engines_become_one_trace_in_the_order_of_arrival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, own = hashes("system", 4), hashes("mine", 2)
    kept = tmp_path / "recordings"
    record(kept, [(100.0, shared, 7, None), (130.5, [*shared, *own], 3, "tool_use")])
    record(kept, [(110.25, [*shared, *hashes("yours", 3)], 0, "end_of_turn")])
    out = tmp_path / "day.jsonl.gz"
    assert entry.main(["record", str(kept), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 requests, 9 different blocks\n"
    header, requests = trace_of(out)
    assert header == {
        "format": "kvtrace-ranges-1",
        "name": "day",
        "requests": 3,
        "unique_blocks": 9,
        "block_tokens": TOKENS,
    }
    assert requests == [
        {"t": 0.0, "s": 0, "o": 7, "h": 0, "r": [0, 4]},
        {"t": 10.25, "s": 0, "o": 0, "h": 2, "r": [0, 7]},
        {"t": 30.5, "s": 0, "o": 3, "h": 1, "r": [0, 4, 7, 2]},
    ]
    assert Trace(gzip.decompress(out.read_bytes())).unique_blocks == 9
    command = ["simulate", "--trace", str(out), "--capacity", "9", "--policy", "lru", "--json"]
    assert entry.main(command) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["requested"], found["hits"]) == (17, 8)


def test_a_recording_tells_nobody_without_the_salt_which_prompts_it_has(tmp_path: Path) -> None:
    prompt = hashes("secret", 3)
    first = record(tmp_path / "one", [(0.0, prompt, 1, None)])
    again = record(tmp_path / "one", [(0.0, prompt, 1, None)])
    other = record(tmp_path / "other", [(0.0, prompt, 1, None)])
    lines = [path.read_bytes().splitlines()[1] for path in (first, again, other)]
    assert lines[0] == lines[1] != lines[2]
    for one in prompt:
        assert one.hex().encode()[:16] not in lines[0]
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "one" / "salt").stat().st_mode) == 0o600


def test_engines_that_start_together_share_the_salt_and_leave_nothing_else(tmp_path: Path) -> None:
    assert recording.prepare(tmp_path / "a") == recording.prepare(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["salt"]


def test_recordings_under_different_salts_do_not_become_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(tmp_path / "one", [(0.0, hashes("same", 2), 1, None)])
    other = record(tmp_path / "other", [(1.0, hashes("same", 2), 1, None)])
    out = tmp_path / "t.jsonl"
    assert entry.main(["record", str(one), str(other), "--out", str(out)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(other) in told
    assert f"its salt is not that of {one}" in told
    assert not out.exists()
    for salt in (path.parent / "salt" for path in (one, other)):
        assert salt.read_bytes().hex() not in one.read_text() + other.read_text()


def test_recordings_that_were_copied_with_their_salt_become_one_trace(tmp_path: Path) -> None:
    one = record(tmp_path / "one", [(0.0, hashes("same", 2), 1, None)])
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "other" / "salt").write_bytes((tmp_path / "one" / "salt").read_bytes())
    other = record(tmp_path / "other", [(1.0, hashes("same", 2), 1, None)])
    out = tmp_path / "t.jsonl"
    assert entry.main(["record", str(one), str(other), "--out", str(out)]) == 0
    assert trace_of(out)[0]["unique_blocks"] == 2


def test_a_line_that_was_being_written_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "kept", [(at, hashes(f"{at}", 2), 1, None) for at in (1.0, 2.0)])
    path.write_bytes(path.read_bytes()[:-9])
    out = tmp_path / "t.jsonl"
    assert entry.main(["record", str(path), "--out", str(out), "--name", "torn"]) == 0
    assert "1 requests, 2 different blocks; 1 unfinished lines" in capsys.readouterr().out
    assert trace_of(out)[0]["name"] == "torn"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no request was recorded"),
        (b'{"format": "other", "block_tokens": 16}\n', "line 1 .*format 'other'"),
        (b"[]\n", "line 1"),
        (b'{"t": 1, "o": 1, "h": 0, "r": [0, 1], "d": "00"}\n', "line 2 .*half a digest"),
        (
            b'{"t": 1, "o": 1, "h": 0, "r": [0, 2], "d": "0123456789abcdef"}\n',
            "blocks 0 to 2, of 1",
        ),
        (b'{"t": 1, "o": 1, "h": 0, "r": [0], "d": ""}\n', "half a range"),
        (b'{"t": NaN, "o": 1, "h": 0, "r": [], "d": ""}\n', "a time that is no number"),
        (b'{"t": 1' + 400 * b"0" + b', "o": 1, "h": 0, "r": [], "d": ""}\n', "line 2"),
        (b'{"t": 1, "o": 1, "h": 0, "r": [], "d": []}\n', "digests that are no text"),
        (b'{"t": ' + 100_000 * b"[" + b"\n", "line 2"),
        (
            b'{"t": 1, "o": 1, "h": 0, "r": ['
            + b", ".join([b"0, 10000"] * 1001)
            + b'], "d": "'
            + 10_000 * b"0123456789abcdef"
            + b'"}\n',
            "more than 10000000 blocks in one request",
        ),
    ],
)
def test_what_is_no_recording_is_named_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, why: str
) -> None:
    path = tmp_path / "x.kvrec"
    header = recording.Encoder(bytes(32), TOKENS, 0.0).header
    path.write_bytes(header + content if content.startswith(b'{"t"') else content)
    assert entry.main(["record", str(path), "--out", str(tmp_path / "t")]) == 2
    told = capsys.readouterr().err
    assert why.split(" .*", maxsplit=1)[0] in told
    assert why.rsplit(" .*", maxsplit=1)[-1] in told
    assert not (tmp_path / "t").exists()


def test_blocks_of_several_sizes_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "kept"
    record(directory, [(0.0, hashes("a", 1), 1, None)])
    other = recording.Encoder(recording.prepare(directory), 32, 0.0)
    (directory / "b.kvrec").write_bytes(other.header)
    assert entry.main(["record", str(directory), "--out", str(tmp_path / "t")]) == 2
    assert "blocks of 32 tokens, elsewhere of 16" in capsys.readouterr().err


def test_a_recording_that_is_named_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "kept", [(0.0, hashes("a", 2), 1, None)])
    out = str(tmp_path / "t")
    assert entry.main(["record", str(path), str(path.parent), str(path), "--out", out]) == 0
    assert "1 requests, 2 different blocks" in capsys.readouterr().out


def test_a_directory_without_recordings_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "t")]
    assert entry.main(["record", str(tmp_path), *out]) == 2
    assert f"no recordings in {tmp_path} (files that end with .kvrec)" in capsys.readouterr().err
    absent = tmp_path / "absent"
    assert entry.main(["record", str(absent), *out]) == 2
    assert capsys.readouterr().err == f"kvstrata record: {absent}: No such file or directory\n"


def test_a_directory_that_may_not_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    assert entry.main(["record", str(tmp_path), "--out", str(tmp_path / "t")]) == 2
    assert capsys.readouterr().err == f"kvstrata record: {tmp_path}: Permission denied\n"


def test_a_place_may_be_a_file_url_and_a_path_that_is_hardly_meant_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "kept", [(0.0, hashes("a", 2), 1, None)])
    out = str(tmp_path / "t")
    assert entry.main(["record", f"file://{tmp_path / 'kept'}", "--out", out]) == 0
    assert "1 requests, 2 different blocks" in capsys.readouterr().out
    for place, told in (("~/kv", "expanded by the shell"), ("s3://b/p", "a path or file:///")):
        assert entry.main(["record", place, "--out", out]) == 2
        assert told in capsys.readouterr().err


class Engine:
    """A recorder, and requests as vLLM has them."""

    def __init__(self, directory: Path, **options: int) -> None:
        recorder = pytest.importorskip("kvstrata.vllm.recorder")
        self.now = 1000.0
        named = recorder.RecordOptions(directory, **options)
        self.recorder = recorder.Recorder(named, TOKENS, clock=lambda: self.now)
        self.directory = directory

    def request(self, prompt: list[bytes], more: int = 0) -> Any:
        return SimpleNamespace(
            num_prompt_tokens=len(prompt) * TOKENS + 3,
            block_hashes=[*prompt, *hashes("answer", more)],
            num_output_tokens=more * TOKENS,
        )

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.kvrec"))


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Engine]:
    return lambda **options: Engine(tmp_path / "recordings", **options)


def test_an_engine_records_prompts_and_not_answers(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start()
    first, second = engine.request(hashes("a", 3), more=2), engine.request(hashes("b", 2))
    engine.recorder.arrived(first, None)
    engine.now += 2
    engine.recorder.arrived(second, "tool_use")
    engine.recorder.ended(second)
    engine.now += 1
    engine.recorder.ended(first)
    # Without an arrival, and without a whole block.
    engine.recorder.ended(first)
    short = engine.request([])
    engine.recorder.arrived(short, None)
    engine.recorder.ended(short)
    engine.recorder.close()
    (path,) = engine.files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(os.getpid()) in path.name
    out = tmp_path / "t.jsonl"
    assert entry.main(["record", str(engine.directory), "--out", str(out)]) == 0
    _, requests = trace_of(out)
    assert requests == [
        {"t": 0.0, "s": 0, "o": 32, "h": 0, "r": [0, 3]},
        {"t": 2.0, "s": 0, "o": 0, "h": 1, "r": [3, 2]},
    ]


def test_files_are_bounded_in_size_and_number(start: Callable[..., Engine]) -> None:
    engine = start(file_bytes=600, files=6)
    for number in range(40):
        request = engine.request(hashes(f"{number}", 8))
        engine.recorder.arrived(request, None)
        engine.recorder.ended(request)
    engine.recorder.close()
    assert engine.recorder.lost == 0
    files = engine.files()
    assert len(files) == 6
    assert all(path.stat().st_size < 1200 for path in files)


def test_the_newest_files_of_a_directory_stay_whoever_wrote_them(
    start: Callable[..., Engine],
) -> None:
    names = []
    for _ in range(3):
        engine = start(files=2)
        request = engine.request(hashes("x", 2))
        engine.recorder.arrived(request, None)
        engine.recorder.ended(request)
        engine.recorder.close()
        names += [path.name for path in engine.files() if path.name not in names]
    assert [path.name for path in engine.files()] == names[-2:]


def test_requests_that_the_disk_is_too_slow_for_are_left_out_and_counted(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = pytest.importorskip("kvstrata.vllm.recorder")
    monkeypatch.setattr(recorder, "WAITING_MAX", 10)
    begun, go_on = threading.Event(), threading.Event()
    create = recording.create

    def slow(path: Path) -> int:
        begun.set()
        go_on.wait(60)
        return create(path)

    engine = start()
    monkeypatch.setattr(recording, "create", slow)
    for number, blocks in enumerate([4, 8, 4, 2]):
        request = engine.request(hashes(f"{number}", blocks))
        engine.recorder.arrived(request, None)
        engine.recorder.ended(request)
        if number == 0:
            assert begun.wait(60)
    go_on.set()
    engine.recorder.close()
    # 8 wait while the first is written; 4 more are too many, 2 are not.
    assert engine.recorder.lost == 1
    (path,) = engine.files()
    assert len(path.read_bytes().splitlines()) == 1 + 3


def test_engines_that_start_together_and_one_that_died_there_agree_on_a_salt(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "kept"
    directory.mkdir(mode=0o700)
    (directory / f".salt-{os.getpid()}").write_bytes(b"half")
    with ThreadPoolExecutor(8) as pool:
        salts = set(pool.map(recording.prepare, [directory] * 16))
    assert len(salts) == 1
    assert sorted(path.name for path in directory.iterdir()) == [f".salt-{os.getpid()}", "salt"]


def test_an_engine_goes_on_when_its_directory_is_gone(start: Callable[..., Engine]) -> None:
    engine = start()
    (engine.directory / "salt").unlink()
    engine.directory.rmdir()
    for number in range(3):
        request = engine.request(hashes(f"{number}", 2))
        engine.recorder.arrived(request, None)
        engine.recorder.ended(request)
    engine.recorder.close()
    assert not engine.directory.exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (3, "not a directory"),
        ({"files": 2}, "nor an object with a 'directory'"),
        ("", "not a directory"),
        ({"directory": " "}, "nor an object with a 'directory'"),
        ("~/kv", "'record' is '~/kv': ~ is expanded by the shell alone"),
        ("file:/kv", "'record' is 'file:/kv': a URL has two slashes"),
        ("file://kv", "'record' is 'file://kv': a path or file:///absolute/path"),
        ({"directory": "s3://b/p"}, "'record' is 's3://b/p': a path or file:///absolute/path"),
        ({"directory": "d", "file_size": "5%"}, "a text like '400GiB'$"),
        ({"directory": "d", "size": 1}, "has no 'size'"),
        ({"directory": "d", "files": 0}, "'files' of 'record' is 0"),
        ({"directory": "d", "files": True}, "'files' of 'record' is True"),
        ({"directory": "d", "file_size": "big"}, "file_size of record"),
    ],
)
def test_a_wrong_option_is_refused(given: Any, why: str) -> None:
    recorder = pytest.importorskip("kvstrata.vllm.recorder")
    with pytest.raises(Exception, match=why) as caught:
        recorder.RecordOptions.parse({"record": given})
    assert type(caught.value).__name__ == "ConfigError"


def test_options_are_read(tmp_path: Path) -> None:
    recorder = pytest.importorskip("kvstrata.vllm.recorder")
    assert recorder.RecordOptions.parse({}) is None
    plain = recorder.RecordOptions.parse({"record": str(tmp_path)})
    assert (plain.directory, plain.file_bytes, plain.files) == (tmp_path, 64 << 20, 16)
    assert recorder.RecordOptions.parse({"record": f"file://{tmp_path}"}) == plain
    given = {"directory": str(tmp_path), "file_size": "1MiB", "files": 2}
    told = recorder.RecordOptions.parse({"record": given})
    assert (told.file_bytes, told.files) == (1 << 20, 2)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        recording.prepare(tmp_path / "open")
