"""A child of a fork: told at once whose the tier is, holding nothing of it, harmless."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINES = ("threads", "uring")

PREAMBLE = """
import hashlib, mmap, multiprocessing, os, signal, sys, time, warnings
import kvstrata

warnings.simplefilter("ignore", DeprecationWarning)
ROW = 65536
SLOTS = 256
ROOT, ENGINE = sys.argv[1:]
arena = mmap.mmap(-1, SLOTS * ROW)

def key(number):
    return hashlib.sha256(b"%d" % number).digest() + bytes(4)

def payload(number):
    return hashlib.shake_128(key(number)).digest(64) * (ROW // 64)

def fill(numbers):
    for slot, number in enumerate(numbers):
        arena[slot * ROW : (slot + 1) * ROW] = payload(number)
    return [key(number) for number in numbers], [slot * ROW for slot in range(len(numbers))]

def open_tier():
    return kvstrata.open_tier(
        ROOT, manifest={"model": "m"}, row_bytes=ROW, arena=arena, min_free=0,
        capacity="64MiB", io_backend=ENGINE,
    )

def result(tier, job):
    for _ in range(300):
        for one in tier.wait(0.1):
            if one.job_id == job:
                return one
    raise AssertionError("the job did not end")

def store(tier, numbers):
    tier.store(1, *fill(numbers))
    return result(tier, 1).success

def load(tier, numbers):
    arena[:] = bytes(len(arena))
    numbers = list(numbers)
    tier.load(2, [key(number) for number in numbers], [ROW * at for at in range(len(numbers))])
    done = result(tier, 2).success
    return done and all(
        arena[slot * ROW : (slot + 1) * ROW] == payload(number)
        for slot, number in enumerate(numbers)
    )

def forks(child):
    "What `child` did not come back from: its exit status."
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return found

CALLS = {
    "lookup": lambda tier: tier.lookup([key(1)]),
    "store": lambda tier: tier.store(7, [key(1)], [0]),
    "load": lambda tier: tier.load(8, [key(1)], [0]),
    "poll": lambda tier: tier.poll(),
    "wait": lambda tier: tier.wait(30.0),
    "drain": lambda tier: tier.drain(),
    "fileno": lambda tier: tier.fileno(),
    "busy_offsets": lambda tier: tier.busy_offsets(),
    "touch": lambda tier: tier.touch([key(1)]),
    "remove": lambda tier: tier.remove([key(1)]),
    "reset": lambda tier: tier.reset(),
    "stats": lambda tier: tier.stats(),
    "capabilities": lambda tier: tier.capabilities(),
    "close": lambda tier: tier.close(),
    "enter": lambda tier: tier.__enter__(),
}
"""


def start(code: str, root: Path, engine: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(root), engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, root: Path, engine: str) -> str:
    process = start(code, root, engine)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return out


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    if name == "uring":
        out = run(
            """
            try:
                open_tier().close()
            except kvstrata.ConfigError as error:
                print(error)
            """,
            tmp_path / "trial",
            name,
        )
        if out:
            pytest.skip(out)
    return name


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_every_method_refuses_a_child_at_once_and_the_parents_jobs_end(
    tmp_path: Path, engine: str
) -> None:
    run(
        """
        tier = open_tier()
        assert store(tier, range(64))
        for name, call in CALLS.items():
            # Jobs are under way at every fork: their threads hold locks that the child inherits.
            numbers = range(1000, 1000 + SLOTS - 64)
            keys = [key(number) for number in numbers]
            tier.remove(keys)
            tier.store(50, keys, [ROW * (64 + slot) for slot in range(len(keys))])
            tier.load(51, [key(number) for number in range(64)], [ROW * at for at in range(64)])
            def child():
                begun = time.monotonic()
                try:
                    call(tier)
                except kvstrata.ClosedError as error:
                    if str(os.getppid()) not in str(error):
                        return 2
                    return 0 if time.monotonic() - begun < 1.0 else 3
                return 1
            status = forks(child)
            assert status == 0, (name, status)
            ended = {}
            while len(ended) < 2:
                ended.update({one.job_id: one for one in tier.wait(30.0)})
            assert ended[50].success and ended[51].success, name
        assert load(tier, range(64))
        tier.close()
        """,
        tmp_path / "kv",
        engine,
    )


def test_a_child_has_none_of_the_parents_descriptors(tmp_path: Path, engine: str) -> None:
    run(
        """
        before = descriptors()
        tier = open_tier()
        assert store(tier, range(64)) and load(tier, range(64))
        ours = set(descriptors().items()) - set(before.items())
        assert any(target.startswith(ROOT) for _, target in ours), ours
        assert any("kvstrata.lock" in target for _, target in ours)
        assert any(".rows" in target for _, target in ours)
        assert ENGINE != "uring" or any("io_uring" in target for _, target in ours), ours
        for _ in range(20):
            tier.load(3, [key(number) for number in range(64)], [ROW * at for at in range(64)])
            def child():
                left = set(descriptors().items()) - set(before.items())
                print(left, file=sys.stderr) if left else None
                return len(left)
            assert forks(child) == 0
            assert result(tier, 3).success
        # The parent keeps all of its own.
        assert ours <= set(descriptors().items())
        tier.close()
        del tier
        left = set(descriptors().items()) - set(before.items())
        assert not left, left
        """,
        tmp_path / "kv",
        engine,
    )


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "os.execv('/bin/true', ['true'])"])
def test_however_a_child_ends_the_parent_goes_on(tmp_path: Path, engine: str, end: str) -> None:
    run(
        f"""
        import gc
        tier = open_tier()
        assert store(tier, range(64))
        tier.load(3, [key(number) for number in range(64)], [ROW * at for at in range(64)])
        with tier:
            pid = os.fork()
            if pid == 0:
                del tier
                gc.collect()
                {end}
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert result(tier, 3).success
            assert store(tier, range(100, 164)) and load(tier, range(100, 164))
        tier = open_tier()
        assert load(tier, range(100, 164))
        tier.close()
        """,
        tmp_path / "kv",
        engine,
    )


def test_a_child_that_outlives_its_killed_parent_keeps_the_root_from_nobody(
    tmp_path: Path, engine: str
) -> None:
    root = tmp_path / "kv"
    parent = start(
        """
        tier = open_tier()
        assert store(tier, range(64))
        for job in range(10, 14):
            tier.load(job, [key(n) for n in range(64)], [ROW * at for at in range(64)])
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        """,
        root,
        engine,
    )
    child = 0
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # Not communicate: the child has the pipes as well.
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        run("tier = open_tier(); assert load(tier, range(64)); tier.close()", root, engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child or parent.pid, signal.SIGKILL)
        with killed_at_the_end(parent):
            pass


def test_multiprocessing_with_the_fork_method_works_beside_a_tier(
    tmp_path: Path, engine: str
) -> None:
    run(
        """
        def work(queue):
            try:
                tier.lookup([key(1)])
            except kvstrata.ClosedError as error:
                queue.put(str(error))
            # A tier of its own, on a root of its own, works in the child.
            global ROOT
            ROOT += "-child"
            own = open_tier()
            queue.put(store(own, range(8)) and load(own, range(8)))
            own.close()

        tier = open_tier()
        assert store(tier, range(64))
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        assert str(os.getpid()) in queue.get()
        assert queue.get() is True
        process.join()
        assert process.exitcode == 0
        assert load(tier, range(64)) and store(tier, range(200, 264))
        tier.close()
        """,
        tmp_path / "kv",
        engine,
    )
