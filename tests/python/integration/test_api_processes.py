"""The API across processes: how a tier ends with its process, signals, full and read-only disks."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
PREAMBLE = """
import hashlib, mmap, os, signal, sys, time
import kvstrata

signal.signal(signal.SIGINT, signal.default_int_handler)

ROW = 65536
arena = mmap.mmap(-1, 64 * ROW)

def key(number):
    return hashlib.sha256(b"%d" % number).digest() + bytes(4)

def payload(number):
    return hashlib.shake_128(key(number)).digest(ROW)

def fill(numbers):
    for slot, number in enumerate(numbers):
        arena[slot * ROW : (slot + 1) * ROW] = payload(number)
    return [key(number) for number in numbers], [slot * ROW for slot in range(len(numbers))]

def open_tier(**changes):
    options = dict(manifest={"model": "m"}, row_bytes=ROW, arena=arena, min_free=0)
    options["capacity"] = "64MiB"
    return kvstrata.open_tier(sys.argv[1], **(options | changes))

def run(tier, kind, numbers):
    keys, offsets = fill(numbers)
    if kind == "load":
        arena[:] = bytes(len(arena))
    getattr(tier, kind)(1, keys, offsets)
    [result] = tier.wait(30.0)
    if kind == "load":
        for slot, (number, outcome) in enumerate(zip(numbers, result.outcomes)):
            row = arena[slot * ROW : (slot + 1) * ROW]
            assert outcome != "ok" or row == payload(number), "a wrong row"
    return result
"""


def start(code: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, root: Path) -> str:
    process = start(code, root)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["/bin/mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "kvstrata-test", mount]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield mount
    subprocess.run(["/bin/umount", "--lazy", mount], check=True)


def test_the_next_process_finds_what_one_stored_that_never_closed(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    run("tier = open_tier(); assert run(tier, 'store', range(32)).success", root)
    run(
        """
        tier = open_tier()
        assert run(tier, "load", range(32)).success
        tier.close()
        """,
        root,
    )


def test_the_interpreter_ends_in_bounded_time_with_jobs_in_flight(tmp_path: Path) -> None:
    begun = time.monotonic()
    run(
        """
        tier = open_tier()
        tier.store(1, *fill(range(64)))
        kept_in_a_global = [tier]
        """,
        tmp_path / "kv",
    )
    assert time.monotonic() - begun < 30


def test_a_killed_process_leaves_a_root_that_opens_and_no_wrong_row(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    for _ in range(3):
        process = start(
            """
            tier = open_tier(capacity="1GiB")  # nothing is evicted
            run(tier, "store", range(16))
            print("stored", flush=True)
            number = 1000
            while True:
                run(tier, "store", range(number, number + 64))
                number += 64
            """,
            root,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run(
        """
        tier = open_tier(capacity="1GiB")  # nothing is evicted
        outcomes = set()
        for number in range(0, 6400, 64):
            outcomes |= set(run(tier, "load", range(number, number + 64)).outcomes)
        assert "ok" in outcomes and outcomes <= {"ok", "miss", "corrupt"}, outcomes
        assert run(tier, "store", range(64)).success
        assert run(tier, "load", range(64)).success
        tier.close()
        """,
        root,
    )


def test_a_second_process_is_refused_and_told_who_holds_the_root(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    holder = start("tier = open_tier(); print('open', flush=True); sys.stdin.read()", root)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        out = run(
            """
            try:
                open_tier()
            except kvstrata.ConfigError as error:
                print(error)
            """,
            root,
        )
        assert str(root) in out
        assert str(holder.pid) in out
    finally:
        holder.kill()
        holder.communicate()
    run("open_tier().close()", root)


@pytest.mark.parametrize("call", ["tier.wait(60.0)", "tier.wait(float('inf'))"])
def test_ctrl_c_ends_a_wait(tmp_path: Path, call: str) -> None:
    process = start(
        f"""
        tier = open_tier()
        print("waiting", flush=True)
        try:
            {call}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert run(tier, "store", range(2)).success
        tier.close()
        """,
        tmp_path / "kv",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "interrupted\n"), errors
    finally:
        process.kill()
        process.communicate()


def test_waiting_lets_other_threads_run(tmp_path: Path) -> None:
    out = run(
        """
        import threading
        tier = open_tier()
        turns = 0
        def spin():
            global turns
            while not done.is_set():
                turns += 1
                time.sleep(0.001)
        done = threading.Event()
        thread = threading.Thread(target=spin)
        thread.start()
        tier.wait(0.5)
        done.set()
        thread.join()
        print(turns)
        tier.close()
        """,
        tmp_path / "kv",
    )
    assert int(out) > 20


def test_a_full_disk_skips_stores_and_keeps_the_older_rows(small_disk: Path) -> None:
    run(
        """
        tier = open_tier(capacity="4MiB")
        first = run(tier, "store", range(4))
        assert first.success, first
        filler = open(os.path.join(sys.argv[1], "..", "filler"), "wb", buffering=0)
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
        outcomes = set()
        for number in range(100, 400, 20):
            outcomes |= set(run(tier, "store", range(number, number + 20)).outcomes)
        assert outcomes <= {"ok", "no_space", "io_error"}, outcomes
        found = [n for n in range(400) if tier.lookup([key(n)]) == [True]]
        assert found
        for n in found:
            assert run(tier, "load", [n]).outcomes == ["ok"], n
        assert isinstance(tier.stats(), dict)
        tier.close()
        """,
        small_disk / "kv",
    )


def test_a_small_disk_is_filled_and_reused_without_an_error(small_disk: Path) -> None:
    run(
        """
        tier = open_tier(capacity="80%", min_free="5%")
        stored = 0
        for number in range(0, 400, 8):
            stored += run(tier, "store", range(number, number + 8)).outcomes.count("ok")
        assert stored > 100, stored
        found = [n for n in range(400) if tier.lookup([key(n)]) == [True]]
        assert found and min(found) > 300, found
        assert all(run(tier, "load", [n]).success for n in found)
        tier.close()
        """,
        small_disk / "kv",
    )


def test_a_read_only_root_is_refused_by_its_path(small_disk: Path) -> None:
    root = small_disk / "kv"
    run("tier = open_tier(capacity='1MiB'); run(tier, 'store', range(2)); tier.close()", root)
    subprocess.run(["/bin/mount", "-o", "remount,ro", small_disk], check=True)
    for place in (root, small_disk / "new"):
        out = run(
            """
            try:
                open_tier(capacity="1MiB")
            except kvstrata.ConfigError as error:
                print(error)
            """,
            place,
        )
        assert str(place) in out
    out = run(
        """
        tier = open_tier(capacity="1MiB", required=False)
        assert tier.lookup([key(0)]) == [False]
        print(run(tier, "store", range(2)).outcomes)
        """,
        root,
    )
    assert "ok" not in out
    subprocess.run(["/bin/mount", "-o", "remount,rw", small_disk], check=True)
    run("tier = open_tier(capacity='1MiB'); assert run(tier, 'load', range(2)).success", root)


def test_a_child_that_a_fork_made_can_end_normally(tmp_path: Path) -> None:
    run(
        """
        tier = open_tier()
        assert run(tier, "store", range(4)).success
        pid = os.fork()
        if pid == 0:
            try:
                tier.lookup([])
            except kvstrata.ClosedError:
                sys.exit(7)
            sys.exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert run(tier, "load", range(4)).success
        assert run(tier, "store", range(10, 14)).success
        tier.close()
        tier = open_tier()
        assert run(tier, "load", range(10, 14)).success
        tier.close()
        """,
        tmp_path / "kv",
    )


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_forked_child_that_lives_on_does_not_hold_the_root(tmp_path: Path, end: str) -> None:
    root = tmp_path / "kv"
    parent = start(
        """
        tier = open_tier()
        assert run(tier, "store", range(4)).success
        child = os.fork()
        if child == 0:
            print("child", flush=True)
            time.sleep(30)
            os._exit(0)
        sys.stdin.readline()
        tier.close()
        print(child, flush=True)
        time.sleep(30)
        """,
        root,
    )
    child = None
    try:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == "child\n"
        if end == "close":
            parent.stdin.write("\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
        else:
            tasks = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            child = int(tasks.read_text())
            parent.kill()
            parent.wait()
        run("tier = open_tier(); assert run(tier, 'load', range(4)).success; tier.close()", root)
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def test_a_disk_without_room_for_one_more_byte_still_serves_what_is_there(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    run("tier = open_tier(); assert run(tier, 'store', range(8)).success; tier.close()", root)
    # No file may grow at all: what a full disk does, without a disk to fill.
    run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        tier = open_tier()
        assert run(tier, "load", range(8)).success
        assert set(run(tier, "store", range(100, 104)).outcomes) == {"no_space"}
        assert run(tier, "load", range(8)).success
        tier.close()
        """,
        root,
    )
