"""`kvstrata gc` removes the oldest first, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvstrata
from kvstrata.cli.gc import directory
from kvstrata.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW_BYTES = 4096
DAY = 86_400


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") + bytes(4) for number in range(count)]


def stored(url: str, model: str, count: int, **options: Any) -> None:
    arena = mmap.mmap(-1, count * ROW_BYTES)
    with kvstrata.open_tier(
        url, manifest={"model": model}, row_bytes=ROW_BYTES, arena=arena, **options
    ) as tier:
        tier.store(1, keys(count), [slot * ROW_BYTES for slot in range(count)])
        (result,) = tier.wait(30.0)
        assert result.success


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["gc", "--json", *arguments]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_bucket_keeps_what_fits_and_its_records(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://gc-{time.monotonic_ns()}/prefix"
    stored(url, "m", 10)
    whole = ROW_BYTES + 256
    told = report_of(capsys, url, "--capacity", str(4 * whole), "--dry-run")
    assert (told["removed_rows"], told["kept_rows"]) == (6, 4)
    told = report_of(capsys, url, "--capacity", str(4 * whole))
    assert (told["removed_rows"], told["removed_bytes"]) == (6, 6 * whole)
    assert (told["kept_rows"], told["failed_rows"], told["emptied"]) == (4, 0, [])
    assert report_of(capsys, url, "--older-than", "1h")["removed_rows"] == 0
    told = report_of(capsys, url, "--capacity", "0")
    assert (told["removed_rows"], told["kept_rows"]) == (4, 0)
    assert len(told["emptied"]) == 1
    # Manifest and epoch are there: the namespace is used as before.
    stored(url, "m", 10)
    assert report_of(capsys, url, "--capacity", "1GiB")["kept_rows"] == 10


def test_a_directory_gives_up_idle_namespaces_whole_and_then_the_coldest_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("idle", "busy"):
        stored(str(tmp_path), model, 100, capacity=8 << 20, min_free=0)
    files = {
        model: sorted(tmp_path.glob(f"{model}-*/rows/g0/*.rows")) for model in ("idle", "busy")
    }
    assert min(len(found) for found in files.values()) >= 2
    for age, path in enumerate(files["idle"]):
        os.utime(path, (time.time() - 3 * DAY - age,) * 2)
    for age, path in enumerate(files["busy"]):
        os.utime(path, (time.time() - 100 - age,) * 2)
    size = files["busy"][0].lstat().st_blocks * 512
    total = sum(path.lstat().st_blocks * 512 for found in files.values() for path in found)
    told = report_of(capsys, str(tmp_path), "--capacity", str(total - size))
    assert told["removed_rows"] == len(files["idle"])
    assert told["emptied"] == [next(tmp_path.glob("idle-*")).name]
    left = sum(path.lstat().st_blocks * 512 for path in files["busy"])
    told = report_of(capsys, str(tmp_path), "--capacity", str(left - size))
    assert told["removed_rows"] == 1
    assert not files["busy"][-1].exists()
    told = report_of(capsys, str(tmp_path), "--older-than", "2d")
    assert told["removed_rows"] == 0


def test_a_directory_in_use_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(str(tmp_path), "m", 10, capacity=1 << 20, min_free=0)
    with (tmp_path / "kvstrata.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["gc", str(tmp_path), "--capacity", "0"]) == 2
    assert "is in use" in capsys.readouterr().err
    assert list(tmp_path.glob("*/rows/g0/*.rows"))


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
HEEDING_INTERRUPTS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("kvstrata.cli", run_name="__main__")
"""


def command(endpoint: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secret"}
    return subprocess.Popen(
        [
            *(sys.executable, "-c", HEEDING_INTERRUPTS),
            *("gc", "s3://bucket/x", "--capacity", "1GiB"),
            *("--endpoint", endpoint, "--allow-http", *arguments),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_it_at_once_and_what_was_done_is_told(silent: str) -> None:
    with command(silent) as running:
        time.sleep(2)
        assert running.poll() is None
        begun = time.monotonic()
        running.send_signal(signal.SIGINT)
        told, said = running.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert running.returncode == 130
    assert said == "kvstrata gc: interrupted\n"
    assert told == "removed 0 rows, 0 B\nkept 0 rows, 0 B\n"


def test_its_time_is_bounded_for_each_request_and_as_a_whole(silent: str) -> None:
    with command(silent, "--time-limit", "0.5s") as running:
        told, said = running.communicate(timeout=20)
    assert running.returncode == 1
    assert said == "kvstrata gc: not done: time limit\n"
    assert told.startswith("removed 0 rows")
    with command(silent, "--deadline", "0.5s") as running:
        told, said = running.communicate(timeout=20)
    assert (running.returncode, told) == (2, "")
    assert "no answer by the deadline" in said


def test_a_signal_brings_what_was_done_so_far(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    class AlarmError(Exception):
        report: dict[str, Any] | None = None

    def alarmed(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, alarmed)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(AlarmError) as caught:
            kvstrata.collect_garbage(
                "s3://bucket/x", capacity=0, endpoint=silent, allow_http=True, deadline_s=60.0
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    report = caught.value.report
    assert report is not None
    assert (report["ended"], report["removed_rows"]) == ("interrupted", 0)


def test_a_directory_says_what_was_removed_before_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(str(tmp_path), "m", 100, capacity=8 << 20, min_free=0)
    files = len(list(tmp_path.glob("*/rows/g0/*.rows")))
    assert files >= 2
    remove = directory._remove

    def interrupted(file: directory.RowFile) -> str | None:
        monkeypatch.setattr(directory, "_remove", interrupt)
        return remove(file)

    def interrupt(_: directory.RowFile) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "_remove", interrupted)
    assert main(["gc", "--json", str(tmp_path), "--capacity", "0"]) == 130
    output = capsys.readouterr()
    assert output.err == "kvstrata gc: interrupted\n"
    told = json.loads(output.out)
    assert (told["removed_rows"], told["kept_rows"]) == (1, files - 1)
    monkeypatch.setattr(directory, "_remove", remove)
    assert main(["gc", "--json", str(tmp_path), "--capacity", "0", "--time-limit", "0s"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ended"], told["removed_rows"]) == ("time limit", 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--capacity", "much"],
        ["--older-than", "soon"],
        [],
        ["--capacity", "1", "--older-than", "1d"],
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    try:
        status = main(["gc", str(tmp_path), *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2


@pytest.mark.parametrize(
    ("url", "arguments", "told"),
    [
        ("s3://b/p", ["--capacity", "10%"], "--capacity: '10%' is not a number of bytes"),
        ("s3://b/p", ["--capacity", "much"], "--capacity: 'much' is not a number of bytes"),
        ("s3://b/p", ["--deadline", "0s"], "--deadline: '0s' is not more than 0s"),
        ("s3://b/p", ["--deadline", "25h"], "--deadline: '25h' is not more than 0s"),
        ("s3://b/p", ["--endpoint", "http://127.0.0.1:1"], "plain HTTP; --allow-http allows that"),
        ("s3://b/p", ["--endpoint", "host:1"], 'gc: --endpoint: "host:1" is not http'),
        ("s3://b/p", ["--ca-bundle", "/absent"], "gc: --ca-bundle: /absent: No such file"),
        ("S3://b/p", [], "'S3://b/p': s3://, gs://, az://, file:/// or a path is expected"),
        ("~/kv", [], "'~/kv': ~ is expanded by the shell alone"),
        ("file:/kv", [], "'file:/kv': a URL has two slashes after its scheme"),
        ("file://kv", [], "'file://kv': a path or file:///absolute/path is expected"),
        (".", ["--endpoint", "http://h:1"], "--endpoint is for buckets alone"),
        (".", ["--deadline", "30s"], "--deadline is for buckets alone"),
        (".", ["--allow-http"], "--allow-http is for buckets alone"),
    ],
)
def test_a_refusal_names_the_option_as_it_was_given(
    capsys: pytest.CaptureFixture[str], url: str, arguments: list[str], told: str
) -> None:
    given = [] if "--capacity" in arguments else ["--capacity", "1GiB"]
    try:
        status = main(["gc", url, *given, *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err


def test_a_directory_of_no_tier_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(tmp_path), "--capacity", "0"]) == 2
    assert "is not a directory of a tier: it has no kvstrata.lock" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_beyond_any_number_of_bytes_keeps_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(str(tmp_path), "m", 10, capacity=1 << 20, min_free=0)
    told = report_of(capsys, str(tmp_path), "--capacity", f"{10**20}PiB")
    assert (told["removed_rows"], told["kept_rows"] > 0) == (0, True)
    url = f"memory://gc-{time.monotonic_ns()}/large"
    assert report_of(capsys, url, "--capacity", f"{10**20}PiB")["removed_rows"] == 0


def test_what_is_told_is_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(str(tmp_path), "m", 1, capacity=1 << 20, min_free=0)
    arguments = ["gc", str(tmp_path), "--capacity", "0"]
    assert main([*arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("would remove 1 row file, ")
    assert told[1] == "would keep 0 row files, 0 B"
    assert told[2].startswith("would be empty: m-")

    def refuse(self: Path, *, missing_ok: bool) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    with monkeypatch.context() as refusing:
        refusing.setattr("pathlib.Path.unlink", refuse)
        assert main(arguments) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "removed 0 row files, 0 B"
    assert told[2].startswith(f"could not remove 1 row file ({tmp_path}")
    assert told[2].endswith(".rows: Operation not permitted)")
    assert main(arguments) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("removed 1 row file, ")
    assert told[2].startswith("empty now: m-")


def test_a_prefix_without_rows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://gc-{time.monotonic_ns()}/prefix"
    stored(url, "m", 1)
    for place, told in ((url, ""), (f"{url}x", f"kvstrata gc: no rows lie below {url}x\n")):
        assert main(["gc", place, "--older-than", "1d", "--json"]) == 0
        printed = capsys.readouterr()
        assert (json.loads(printed.out)["unit"], printed.err) == ("rows", told)
