"""Fixtures for every Python test, and a check that no test leaves something of ours behind."""

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
GONE_WITHIN_S = 10.0
OF_RUST_TESTS = "kvstrata-rust-"
PR_SET_CHILD_SUBREAPER = 36
# Started once by the standard library and kept for the life of the interpreter.
STANDING_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_configure(config: pytest.Config) -> None:
    """Makes orphans of our children our own, so that the leak check sees them.

    The fixtures need Linux anyway, as the project does.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_report_header() -> list[str]:
    """Says which vLLM the run was asked to test, and checks that it is the one imported."""
    expected = os.environ.get("KVSTRATA_TEST_VLLM")
    if expected is None:
        return []
    import vllm

    if not vllm.__version__.startswith(expected):
        pytest.exit(f"vLLM {expected} was to be tested, {vllm.__version__} is here", 4)
    return [f"vllm: {vllm.__version__} from {Path(vllm.__file__).parent}"]


def live_children() -> dict[int, str]:
    """Returns process id and command line of every child that still runs."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            listed = (task / "children").read_text().split()
        except FileNotFoundError:  # the thread ended; its children are another's now
            continue
        for pid in map(int, listed):
            process = Path(f"/proc/{pid}")
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z" and not any(helper in command for helper in STANDING_HELPERS):
                found[pid] = command
    return found


def shared_files() -> set[str]:
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if not name.startswith(OF_RUST_TESTS)}


def maps_file(process: Path, number: int) -> bool:
    lines = (process / "maps").read_text(errors="replace").splitlines()
    mapped = [line.split(None, 5) for line in lines]
    return any(
        int(m[4]) == number and m[5].startswith(f"{SHARED_MEMORY}/") for m in mapped if m[5:]
    )


def has_open(process: Path, number: int) -> bool:
    for link in (process / "fd").iterdir():
        try:
            in_memory = str(link.readlink()).startswith(f"{SHARED_MEMORY}/")
            if in_memory and link.stat().st_ino == number:
                return True
        except FileNotFoundError:  # it was closed
            continue
    return False


def held_by_strangers(name: str) -> bool:
    """Tells whether a process other than this one maps the shared memory file, or has it open.

    By its number, not its name: a named semaphore is mapped under a name of its making.
    """
    try:
        number = (SHARED_MEMORY / name).stat().st_ino
    except FileNotFoundError:
        return True
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if maps_file(process, number) or has_open(process, number):
                return True
        except OSError:  # it ended, or belongs to another user
            continue
    return False


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test after which a child still runs, or a shared memory file of ours is left.

    A file that a running process maps belongs to that process: another run on the same machine.
    """
    children_before = set(live_children())
    files_before = shared_files()
    yield
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        children = {p: c for p, c in live_children().items() if p not in children_before}
        files = {f for f in shared_files() - files_before if not held_by_strangers(f)}
        if (not children and not files) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not children, f"processes left running: {children}"
    assert not files, f"left in {SHARED_MEMORY}: {sorted(files)}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A private directory on disk for a tier's files; it is there and empty."""
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def repository() -> Path:
    """The repository's top folder."""
    return Path(__file__).resolve().parents[2]
