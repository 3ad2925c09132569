"""Runs one engine process, shows that it lives, and leaves nothing of it behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ENGINE_TIMEOUT_S = 900.0

_POLL_S = 0.5
_HEARTBEAT_S = 15.0
_END_TIMEOUT_S = 20.0
_LOG_TAIL_LINES = 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - vLLM's own place for shared regions
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # A worker that is slow to end is not a reason to skip the rest of the shutdown.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "10",
}


class EngineError(Exception):
    """An engine process failed or took too long. The message has the end of its log."""


@dataclasses.dataclass
class EngineRun:
    """What an engine process answered, and what it would have left behind."""

    result: dict[str, Any]
    pid: int
    seconds: float
    left_processes: list[int]
    left_shared_memory: list[str]


@dataclasses.dataclass(frozen=True)
class EngineFiles:
    """The files through which parent and engine process talk."""

    request: Path
    result: Path
    progress: Path
    log: Path

    @classmethod
    def under(cls, directory: Path, name: str) -> EngineFiles:
        """The files of the engine `name` in `directory`."""
        return cls(
            request=directory / f"{name}.request.json",
            result=directory / f"{name}.result.json",
            progress=directory / f"{name}.progress",
            log=directory / f"{name}.log",
        )


def run_engine(
    files: EngineFiles,
    request: dict[str, Any],
    say: Callable[[str], None],
    timeout_s: float = ENGINE_TIMEOUT_S,
    environment: Mapping[str, str] = os.environ,
) -> EngineRun:
    """Start an engine process, wait for its end, return what it answered.

    The process and everything it started has ended when this returns or raises, and their sockets
    and the shared memory they mapped are gone: regions they left are named in the answer.

    # Errors
    `EngineError` when the process fails, gives no result, or is not done after `timeout_s`.
    """
    files.request.write_text(json.dumps(request), encoding="utf-8")
    files.progress.write_text("", encoding="utf-8")
    started = time.monotonic()
    seen: set[Path] = set()
    left_processes: list[int] = []
    left_shared: list[str] = []
    # vLLM never removes its sockets. Not next to the files: a socket's path has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-", ignore_cleanup_errors=True) as sockets,
        files.log.open("wb") as log,
    ):
        process = subprocess.Popen(
            _command(files),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, **_ENVIRONMENT, "VLLM_RPC_BASE_PATH": sockets},
        )
        try:
            ended = _watch(process, files.progress, say, timeout_s, seen)
        finally:
            left_processes = end_session(process)
            seen |= _named_regions(request)
            left_shared = remove_shared_memory(seen)
    if not ended:
        raise EngineError(_failure(f"the engine was not done after {timeout_s:.0f} s", files.log))
    if process.returncode != 0 or not files.result.exists():
        text = f"the engine process ended with status {process.returncode}"
        raise EngineError(_failure(text, files.log))
    return EngineRun(
        result=json.loads(files.result.read_text(encoding="utf-8")),
        pid=process.pid,
        seconds=time.monotonic() - started,
        left_processes=left_processes,
        left_shared_memory=left_shared,
    )


def _command(files: EngineFiles) -> list[str]:
    arguments = [str(files.request), str(files.result), str(files.progress)]
    return [sys.executable, "-m", "kvstrata.cli.demo.engine", *arguments]


def _watch(
    process: subprocess.Popen[bytes],
    progress: Path,
    say: Callable[[str], None],
    timeout_s: float,
    seen: set[Path],
) -> bool:
    """Report progress until the process ends; False when the time is up first."""
    started = time.monotonic()
    spoken = started
    lines = 0
    last = "starting"
    while process.poll() is None:
        now = time.monotonic()
        if now - started > timeout_s:
            return False
        told = progress.read_text(encoding="utf-8").splitlines()
        for line in told[lines:]:
            last, spoken = line, now
            say(f"{line} [{now - started:.0f} s]")
        lines = len(told)
        if now - spoken > _HEARTBEAT_S:
            spoken = now
            say(f"{last} ... [{now - started:.0f} s]")
        for pid in session_processes(process.pid):
            seen |= _mapped_shared_memory(pid)
        time.sleep(_POLL_S)
    return True


def session_processes(session: int) -> list[int]:
    """The processes of a session that still run, zombies left out."""
    found = []
    for entry in _process_directories():
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # After the name in parentheses: state, parent, process group, session.
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in {"Z", "X"} and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def end_session(process: subprocess.Popen[bytes]) -> list[int]:
    """End what is left of a process and its session; returns the pids that had to be killed.

    A process gets the time of `_END_TIMEOUT_S` to end by itself: first undisturbed when the main
    process is over already, else after SIGTERM. Then it is killed, by its number.
    """
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None and not session_processes(process.pid):
            return []
        time.sleep(0.1)
    killed = []
    for pid in session_processes(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.append(pid)
    process.wait()
    while session_processes(process.pid):
        time.sleep(0.1)
    return killed


def remove_shared_memory(paths: set[Path]) -> list[str]:
    """Remove the given regions that still exist; returns their names."""
    left = []
    for path in sorted(paths):
        try:
            path.unlink()
        except OSError:
            continue
        left.append(path.name)
    return left


def _named_regions(request: dict[str, Any]) -> set[Path]:
    """Regions named after the engine's id, also those no process was seen to map."""
    engine_id = request.get("engine", {}).get("kv_transfer_config", {}).get("engine_id")
    return set(_SHARED_MEMORY.glob(f"*{engine_id}*")) if engine_id else set()


def _mapped_shared_memory(pid: int) -> set[Path]:
    """Regions under /dev/shm that a process maps and that have a name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    prefix = f"{_SHARED_MEMORY}/"
    names = (line[line.find(prefix) :] for line in maps.splitlines() if prefix in line)
    return {Path(name) for name in names if not name.endswith("(deleted)")}


def _process_directories() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _failure(text: str, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(lines[-_LOG_TAIL_LINES:])
    return f"{text}; the end of its log:\n{tail}"
