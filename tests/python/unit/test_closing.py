"""The end of a tier: closing, forgetting to, forks, the memory it was given."""

import copy
import gc
import mmap
import os
import pickle
import threading
import time
from typing import Any

import pytest

import kvstrata

CALLS = {
    "lookup": ([],),
    "store": (1, [], []),
    "load": (1, [], []),
    "poll": (),
    "wait": (1.0,),
    "drain": (),
    "fileno": (),
    "busy_offsets": (),
    "touch": ([],),
    "remove": ([],),
    "reset": (),
    "stats": (),
    "capabilities": (),
    "__enter__": (),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_tier_raises_closed_error(bench: Any, name: str) -> None:
    tier = bench.open()
    tier.close()
    with pytest.raises(kvstrata.ClosedError, match="closed"):
        getattr(tier, name)(*CALLS[name])


def test_close_after_success_does_nothing(bench: Any) -> None:
    tier = bench.open()
    tier.close()
    tier.close()
    tier.close(0)
    tier.close(timeout_s=1)
    assert "closed" in repr(tier)


def test_leaving_the_context_closes(bench: Any) -> None:
    with bench.open() as tier:
        assert isinstance(tier, kvstrata.Tier)
        bench.store(tier, bench.keys([1]))
    with pytest.raises(kvstrata.ClosedError):
        tier.lookup([])


def test_an_exception_in_the_context_passes_and_closes(bench: Any) -> None:
    with pytest.raises(ZeroDivisionError), bench.open() as tier:
        _ = 1 / 0
    with pytest.raises(kvstrata.ClosedError):
        tier.lookup([])


def test_the_arena_is_held_until_the_tier_is_closed(bench: Any) -> None:
    arena = bytearray(1 << 16)
    mapped = mmap.mmap(-1, 1 << 16)
    view = memoryview(bytearray(1 << 16))
    tiers = [
        bench.open(arena=held, url=bench.root.with_name(f"kv{i}"))
        for i, held in enumerate((arena, mapped, view))
    ]
    for attempt in (lambda: arena.append(1), mapped.close, view.release):
        with pytest.raises(BufferError):
            attempt()
    for tier in tiers:
        tier.close()
    arena.append(1)
    mapped.close()
    view.release()


def test_a_refused_open_gives_the_arena_back(bench: Any) -> None:
    arena = bytearray(1 << 16)
    with pytest.raises(kvstrata.ConfigError):
        bench.open(arena=arena, policy="newest")
    arena.append(1)


def test_close_ends_the_jobs_in_flight_first(bench: Any) -> None:
    for number in range(10):
        tier = bench.open()
        keys = bench.keys(range(number * 64, number * 64 + 64))
        tier.store(1, keys, bench.fill(keys))
        tier.close()
    tier = bench.open()
    keys = bench.keys(range(640))
    present = [key for key, there in zip(keys, tier.lookup(keys), strict=True) if there]
    for start in range(0, len(present), 64):
        part = present[start : start + 64]
        assert bench.load(tier, part).success
        assert bench.holds(part)


def test_a_tier_that_nobody_closed_is_closed_with_a_warning(bench: Any) -> None:
    arena = bytearray(1 << 16)
    root = bench.root.with_name("forgotten")
    options: Any = {"manifest": {"model": "m"}, "row_bytes": 8192, "capacity": 1 << 24}
    tier = kvstrata.open_tier(root, arena=arena, min_free=0, **options)
    arena[:8192] = bench.payload(bench.key(1))
    tier.store(1, [bench.key(1)], [0])
    assert bench.wait(tier, 1).success
    with pytest.warns(ResourceWarning, match="unclosed"):
        del tier
    arena.append(1)
    gc.collect()
    with kvstrata.open_tier(root, arena=bytearray(8192), min_free=0, **options) as tier:
        assert tier.lookup([bench.key(1)]) == [True]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_tier_cannot_be_pickled_or_copied(bench: Any, copied: Any) -> None:
    with pytest.raises(TypeError, match="cannot be"):
        copied(bench.open())


def test_tiers_come_from_open_tier_only() -> None:
    with pytest.raises(TypeError):
        kvstrata.Tier()
    with pytest.raises(TypeError):
        kvstrata.JobResult()  # type: ignore[call-arg, unused-ignore]


def test_closing_in_one_thread_ends_the_wait_of_another(bench: Any) -> None:
    tier = bench.open()
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(tier.wait(60.0))
        except kvstrata.ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    tier.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_threads_that_use_a_tier_while_it_closes_get_results_or_closed_error(bench: Any) -> None:
    for _ in range(5):
        tier = bench.open()
        others: list[BaseException] = []

        def work(lane: int, tier: kvstrata.Tier = tier, others: Any = others) -> None:
            try:
                for turn in range(1000):
                    tier.store(lane * 10_000 + turn, [bench.key(turn)], [lane * bench.stride])
                    tier.poll()
                    tier.lookup([bench.key(turn)])
            except kvstrata.ClosedError:
                pass
            except BaseException as error:  # noqa: BLE001 - any at all
                others.append(error)

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        tier.close()
        for thread in threads:
            thread.join()
        assert others == []


def in_child(work: Any) -> str:
    """What `work` returned in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(work())
        except BaseException as error:  # noqa: BLE001 - any at all
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_gets_closed_error_and_harms_nothing(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    bench.store(tier, keys)
    for name, arguments in CALLS.items():
        text = in_child(lambda name=name, arguments=arguments: getattr(tier, name)(*arguments))
        assert text.startswith("ClosedError"), (name, text)
        assert str(os.getpid()) in text
    assert in_child(tier.close).startswith("ClosedError")

    def end_normally() -> None:
        from kvstrata import _native

        del _native
        import atexit

        atexit._run_exitfuncs()

    assert in_child(end_normally) == "None"
    assert bench.load(tier, keys).success
    assert bench.holds(keys)
    assert bench.store(tier, bench.keys([2])).success
