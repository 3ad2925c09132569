from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from kvstrata.cli.demo import process

# A child that maps a region in /dev/shm, starts a grandchild that ignores SIGTERM, and goes on.
STUBBORN = """
import mmap, os, signal, subprocess, sys, time
region, progress, how = sys.argv[1:]
with open(region, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", code])
with open(progress, "a") as lines:
    print("grandchild", grandchild.pid, file=lines)
time.sleep(2)
if how == "exit":
    sys.exit("said at the end")
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


@pytest.fixture
def files(tmp_path: Path) -> process.EngineFiles:
    return process.EngineFiles.under(tmp_path, "engine")


@pytest.mark.parametrize(
    ("how", "words"), [("hang", "not done after"), ("exit", "said at the end")]
)
def test_an_engine_that_hangs_or_fails_leaves_no_process_and_no_shared_memory(
    files: process.EngineFiles, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    region = Path("/dev/shm") / f"kvstrata-test-{uuid.uuid4()}"
    arguments = [str(region), str(files.progress), how]
    monkeypatch.setattr(process, "_command", lambda _: [sys.executable, "-c", STUBBORN, *arguments])
    monkeypatch.setattr(process, "_END_TIMEOUT_S", 1.0)
    said: list[str] = []
    with pytest.raises(process.EngineError, match=words):
        process.run_engine(files, {}, said.append, timeout_s=5.0)
    grandchild = int(said[0].split()[1])
    assert not alive(grandchild)
    assert not region.exists()


def test_an_engine_that_ends_well_gives_its_result_and_progress(
    files: process.EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, time; open(sys.argv[1], 'a').write('half way\\n'); time.sleep(1); "
        "open(sys.argv[2], 'w').write('{\"steps\": []}')"
    )
    arguments = [str(files.progress), str(files.result)]
    monkeypatch.setattr(process, "_command", lambda _: [sys.executable, "-c", code, *arguments])
    said: list[str] = []
    done = process.run_engine(files, {"engine": {}}, said.append)
    assert done.result == {"steps": []}
    assert (done.left_processes, done.left_shared_memory) == ([], [])
    assert said[0].startswith("half way")


def test_the_sockets_that_vllm_leaves_are_removed(
    files: process.EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import json, os, socket, sys; "
        "path = os.environ['VLLM_RPC_BASE_PATH'] + '/' + 36 * 'x'; "
        "socket.socket(socket.AF_UNIX).bind(path); "
        "json.dump({'path': path, 'bound': os.path.exists(path)}, open(sys.argv[1], 'w'))"
    )
    command = [sys.executable, "-c", code, str(files.result)]
    monkeypatch.setattr(process, "_command", lambda _: command)
    done = process.run_engine(files, {"engine": {}}, lambda _: None)
    assert done.result["bound"]
    assert not Path(done.result["path"]).parent.exists()


def test_an_interrupt_ends_the_engine_too(
    files: process.EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(process, "_command", lambda _: [sys.executable, "-c", code])
    monkeypatch.setattr(process, "_HEARTBEAT_S", 0.0)
    started: list[int] = []
    # Servers of other tests, for example.
    others = _children()

    def interrupt(_: str) -> None:
        started.extend(_children() - others)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.run_engine(files, {}, interrupt)
    assert time.monotonic() - began < 15
    assert started
    assert not any(process.session_processes(pid) for pid in started)


def _children() -> set[int]:
    me = os.getpid()
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {int(entry.name) for entry in entries if _parent(entry) == me}


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_region_named_after_the_engine_is_removed_even_if_no_process_was_seen_to_map_it(
    files: process.EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_id = f"kvstrata-test-{uuid.uuid4()}"
    region = Path("/dev/shm") / f"vllm_offload_{engine_id}.mmap"
    code = f"open({str(region)!r}, 'w').close(); import os; os.kill(os.getpid(), {signal.SIGKILL})"
    monkeypatch.setattr(process, "_command", lambda _: [sys.executable, "-c", code])
    request = {"engine": {"kv_transfer_config": {"engine_id": engine_id}}}
    with pytest.raises(process.EngineError, match="status -9"):
        process.run_engine(files, request, lambda _: None)
    assert not region.exists()
