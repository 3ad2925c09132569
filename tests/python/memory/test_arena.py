"""The arena: one memory in several processes, and nothing of it when they are gone."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from memory_support import arena_process

from kvstrata.memory import arena as arenas
from kvstrata.memory import numa
from kvstrata.memory.arena import Arena, ArenaError
from kvstrata.memory.limits import MemoryRefusedError, Room

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = (1 << 20) + 4096
MIB = 1 << 20

# Children of a process that has torch already.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kvstrata.memory.arena", "kvstrata.memory.pinning"])


@pytest.fixture
def name() -> str:
    return f"kvstrata-test-{uuid.uuid4().hex}"


class Process:
    def __init__(self, role: str, name: str, size: int = 0) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.child = CONTEXT.Process(
            target=arena_process.main, args=(theirs, role, name, size), daemon=True
        )
        self.child.start()
        theirs.close()

    def answer(self) -> int:
        assert self.pipe.poll(30), "no answer"
        found: int = self.pipe.recv()
        return found

    def say(self, what: str, offset: int = 0, value: int = 0) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((what, offset, value))

    def ask(self, what: str, offset: int = 0, value: int = 0) -> int:
        self.say(what, offset, value)
        return self.answer()

    def end(self) -> None:
        self.child.kill()
        self.child.join()
        self.pipe.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        process.end()


def test_several_processes_see_one_memory(name: str, processes: list[Process]) -> None:
    processes += [Process("create", name, SIZE), Process("join", name), Process("join", name)]
    assert [process.answer() for process in processes] == [SIZE] * 3
    with contextlib.closing(Arena.join(name, 10)) as mine:
        assert mine.nbytes == SIZE
        assert mine.tensor.dtype == torch.uint8
        assert mine.tensor.shape == (SIZE,)
        assert processes[1].ask("write", 77, 5) == 5
        assert processes[0].ask("read", 77) == 5
        assert mine.buffer[77] == 5
        mine.buffer[78] = 9
        assert processes[2].ask("read", 78) == 9


def test_the_creator_may_come_later_than_who_joins(name: str, processes: list[Process]) -> None:
    processes.append(Process("join", name))
    time.sleep(0.2)
    with contextlib.closing(Arena.create(SIZE, name)):
        assert processes[0].answer() == SIZE


def test_an_arena_that_nobody_offers_is_given_up_in_time_naming_one_node(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(ArenaError, match=rf"{name}.*0\.3 s.*node"):
        Arena.join(name, 0.3)
    assert time.monotonic() - start < 20


def test_two_engines_of_one_name_are_refused_and_the_first_goes_on(name: str) -> None:
    with contextlib.closing(Arena.create(SIZE, name)) as first:
        with pytest.raises(ArenaError, match="already"):
            Arena.create(SIZE, name)
        with contextlib.closing(Arena.join(name, 5)) as joined:
            first.buffer[3] = 4
            assert joined.buffer[3] == 4
    Arena.create(SIZE, name).close()


def test_it_has_no_name_in_any_file_system_and_its_size_stands(name: str) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with contextlib.closing(Arena.create(SIZE, name)) as arena:
        assert sorted(Path("/dev/shm").iterdir()) == before
        assert "/memfd:kvstrata-arena" in str(Path(f"/proc/self/fd/{arena.fd}").readlink())
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)
        assert not os.get_inheritable(arena.fd)


def test_no_page_is_taken_before_it_is_used(name: str) -> None:
    with contextlib.closing(Arena.create(64 * MIB, name)) as arena:
        assert os.fstat(arena.fd).st_blocks == 0
        arena.tensor[5 * MIB] = 1
        assert os.fstat(arena.fd).st_blocks * 512 <= 2 * MIB


@pytest.mark.parametrize(
    "room", [Room(SIZE - 1, None, None), Room(1 << 40, SIZE - 1, 0)], ids=["memory", "cgroup"]
)
def test_a_size_that_cannot_be_given_is_refused_before_anything_is_made(
    name: str, room: Room
) -> None:
    with pytest.raises(MemoryRefusedError, match=r"cpu_bytes_to_use"):
        Arena.create(SIZE, name, room=room)
    with contextlib.closing(Arena.create(SIZE, name, room=Room(SIZE, SIZE, 0))):
        pass


def test_more_than_the_machine_has_is_refused(name: str) -> None:
    with pytest.raises(MemoryRefusedError, match=r"available.*cgroup.*/dev/shm"):
        Arena.create(1 << 60, name)
    with pytest.raises(ArenaError):
        Arena.create(0, name)


def test_closing_says_whether_a_view_is_left_and_may_be_done_twice(name: str) -> None:
    arena = Arena.create(SIZE, name)
    view = arena.tensor[10:20]
    assert not arena.close()
    assert view.tolist() == [0] * 10, "memory went away under a view"
    assert arena.fd == -1
    other = Arena.create(SIZE, name)
    assert other.close()
    assert other.close()


def test_another_user_gets_nothing_and_offers_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Arena.create(SIZE, name)):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        # Both sides are this process: the one that joins refuses first.
        with pytest.raises(ArenaError, match="user"):
            Arena.join(name, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(arenas._address(name))
            peer.settimeout(5)
            assert peer.recv(100) == b"", "a process of another user was answered"
        monkeypatch.undo()
        Arena.join(name, 5).close()


@pytest.mark.parametrize("told", [b"", b"kvarena1", b"\0" * 16], ids=["nothing", "half", "none"])
def test_whatever_else_answers_is_not_mapped(name: str, told: bytes) -> None:
    fd = os.memfd_create("kvstrata-test")
    os.ftruncate(fd, SIZE)
    with arenas._bind(name) as offered:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = offered.accept()
                    with peer:
                        if told:
                            socket.send_fds(peer, [told], [fd])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ArenaError):
            Arena.join(name, 0.3)
        offered.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    os.close(fd)


def test_a_memfd_that_may_still_shrink_is_not_mapped(name: str) -> None:
    fd = os.memfd_create("kvstrata-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ArenaError, match="none"):
        arenas._checked_size(fd, arenas._HEADER.pack(arenas._MAGIC, SIZE), name)
    os.close(fd)


def test_a_forked_child_keeps_neither_the_name_nor_the_descriptor(name: str) -> None:
    arena = Arena.create(SIZE, name)
    fd = arena.fd
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        ok = arena.fd == -1
        with contextlib.suppress(OSError):
            ok = ok and "memfd:kvstrata" not in str(Path(f"/proc/self/fd/{fd}").readlink())
        os.write(ready[1], b"y" if ok else b"n")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"y"
        assert arena.close()
        Arena.create(SIZE, name).close()
    finally:
        for end in (*ready, *go):
            os.close(end)
        os.waitpid(child, 0)


def holders(name: str) -> list[int]:
    """Processes that map the arena of this name or hold its descriptor."""
    found, label = set(), arenas._label(name)
    for pid in list(Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            links = [str(each.readlink()) for each in list((pid / "fd").iterdir())]
            maps = (pid / "maps").read_text(errors="replace")
            if label in maps or any(label in link for link in links):
                found.add(int(pid.name))
    return sorted(found)


def shared_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    pytest.fail("no Shmem in /proc/meminfo")


def kill_at_random(points: range, processes: list[Process], name: str, size: int) -> bool:
    """Starts three processes, and kills all of them at some point; again and again.

    Tells whether one of them was seen to hold the arena.
    """
    seen = False
    for point in points:
        draw = random.Random(point)
        started = [Process("create", name, size), Process("join", name), Process("join", name)]
        processes += started
        if draw.random() < 0.7:
            for process in started:
                process.answer()
            for process in started:
                process.say(draw.choice(["churn", "write", "read"]), draw.randrange(size), 1)
            seen = seen or len(holders(name)) == len(started)
        time.sleep(draw.random() * 0.4)
        for process in draw.sample(started, len(started)):
            process.child.kill()
        for process in started:
            process.end()
            processes.remove(process)
    return seen


def check_kills(points: range, processes: list[Process], name: str) -> None:
    size = 192 * MIB
    files, memory = sorted(Path("/dev/shm").glob("*kvstrata*")), shared_memory()
    assert kill_at_random(points, processes, name, size)
    assert not holders(name)
    assert sorted(Path("/dev/shm").glob("*kvstrata*")) == files
    # Others on the machine take shared memory, too, though hardly as much as half of all arenas.
    limit = memory + len(points) * size // 2
    for _ in range(100):
        if shared_memory() < limit:
            break
        time.sleep(0.1)
    assert shared_memory() < limit


def test_killing_all_processes_leaves_nothing(processes: list[Process], name: str) -> None:
    check_kills(range(3), processes, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killing_all_processes_at_45_points_leaves_nothing(
    processes: list[Process], name: str
) -> None:
    check_kills(range(100, 145), processes, name)


def test_one_that_is_killed_is_joined_again_under_the_same_name(
    name: str, processes: list[Process]
) -> None:
    for _ in range(2):
        creator, other = Process("create", name, SIZE), Process("join", name)
        processes += [creator, other]
        assert creator.answer() == other.answer() == SIZE
        assert other.ask("read", 9) == 0, "memory of a killed engine came back"
        other.ask("write", 9, 1)
        while processes:
            processes.pop().end()


@pytest.mark.parametrize("policy", numa.POLICIES)
def test_a_memory_policy_is_a_wish(policy: str, name: str) -> None:
    with contextlib.closing(Arena.create(SIZE, name, numa_policy=policy)) as arena:
        arena.tensor.fill_(3)
    with pytest.raises(ValueError, match="numa"):
        numa.apply("everywhere", 0, 0)


def test_pages_are_asked_for_on_the_nodes_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, list[int]]] = []

    def mbind(address: int, nbytes: int, mode: int, nodes: list[int]) -> bool:
        asked.append((mode, nodes))
        return True

    monkeypatch.setattr(numa, "_mbind", mbind)
    (tmp_path / "has_memory").write_text("0-1,3\n")
    cpu = min(os.sched_getaffinity(0))
    for node, cpus in ((0, "900"), (1, f"800,{cpu}"), (3, "901-903")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(cpus)
    assert numa.apply("interleave", 0, SIZE, tmp_path)
    assert numa.apply("local", 0, SIZE, tmp_path)
    assert not numa.apply("off", 0, SIZE, tmp_path)
    assert asked == [(3, [0, 1, 3]), (1, [1])]
    (tmp_path / "has_memory").write_text("0\n")
    assert not numa.apply("interleave", 0, SIZE, tmp_path)
    assert len(asked) == 2


def test_a_kernel_that_refuses_the_policy_is_warned_about_and_not_more(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Page 1 is no mapping of ours: the kernel answers EFAULT, as a sandbox answers EPERM.
    assert not numa._mbind(4096, 4096, 3, [0])
    assert "refused the memory policy" in caplog.text or "no memory policy on" in caplog.text


def test_an_arena_that_cannot_be_made_leaves_its_name_to_the_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        msg = "no such node"
        raise ArenaError(msg)

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(numa, "apply", refuse)
        with pytest.raises(ArenaError, match="no such node"):
            Arena.create(SIZE, name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    arena = Arena.create(SIZE, name)
    assert arena.close()


class OutOfDescriptors:
    """A listening socket that twice has no descriptor for who asks."""

    def __init__(self, offered: socket.socket) -> None:
        self.offered = offered
        self.refusals = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.offered.accept()

    def shutdown(self, how: int) -> None:
        self.offered.shutdown(how)

    def close(self) -> None:
        self.offered.close()


def test_who_asks_while_there_is_no_descriptor_is_answered_when_there_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = arenas._bind
    monkeypatch.setattr(arenas, "_bind", lambda name: OutOfDescriptors(bind(name)))
    arena = Arena.create(SIZE, name)
    arena.tensor[0] = 7
    joined = Arena.join(name, 10)
    assert joined.tensor[0] == 7
    assert joined.close()
    assert arena.close()
