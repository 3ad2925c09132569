"""Storing, loading, looking up, removing, resetting."""

import select
import threading
import time
from typing import Any

import pytest


def test_a_stored_row_loads_with_the_same_bytes(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1, 2, 3]) + bench.keys([1, 2], group=1)
    stored = bench.store(tier, keys)
    assert (stored.kind, stored.success, stored.outcomes) == ("store", True, ["ok"] * 5)
    assert stored.bytes == 3 * 8192 + 2 * 5000
    assert stored.busy == []
    assert stored.error is None
    assert stored.seconds >= 0
    loaded = bench.load(tier, keys)
    assert (loaded.kind, loaded.success, loaded.outcomes) == ("load", True, ["ok"] * 5)
    assert loaded.bytes == stored.bytes
    assert bench.holds(keys)


def test_a_load_writes_only_the_slots_payload_bytes(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1], group=1)
    bench.store(tier, keys)
    bench.arena[: 3 * 8192] = b"\x11" * 3 * 8192
    tier.load(1, keys, [8192])
    assert bench.wait(tier, 1).success
    assert bench.arena[:8192] == b"\x11" * 8192
    assert bench.arena[8192 : 8192 + 5000] == bench.payload(keys[0])
    assert bench.arena[8192 + 5000 : 3 * 8192] == b"\x11" * (2 * 8192 - 5000)


def test_slots_may_lie_at_any_byte_offset(bench: Any) -> None:
    tier = bench.open()
    key = bench.key(1)
    bench.arena[777 : 777 + 8192] = bench.payload(key)
    tier.store(1, [key], [777])
    assert bench.wait(tier, 1).success
    tier.load(2, [key], [100_001])
    assert bench.wait(tier, 2).success
    assert bench.arena[100_001 : 100_001 + 8192] == bench.payload(key)


def test_the_same_hash_in_two_groups_is_two_rows(bench: Any) -> None:
    tier = bench.open()
    bench.store(tier, bench.keys([1], group=1))
    assert tier.lookup([bench.key(1), bench.key(1, group=1)]) == [False, True]


def test_lookup_tells_what_is_there_in_the_order_of_the_keys(bench: Any) -> None:
    tier = bench.open()
    bench.store(tier, bench.keys([1, 3]))
    assert tier.lookup(bench.keys([3, 2, 1])) == [True, False, True]
    assert tier.lookup([]) == []


def test_outcomes_have_the_order_of_the_keys(bench: Any) -> None:
    tier = bench.open()
    bench.store(tier, bench.keys([2, 4]))
    loaded = bench.load(tier, bench.keys([1, 2, 3, 4, 5]))
    assert loaded.outcomes == ["miss", "ok", "miss", "ok", "miss"]
    assert not loaded.success
    stored = bench.store(tier, bench.keys([5, 4, 3, 2]))
    assert stored.outcomes == ["ok", "present", "ok", "present"]
    assert stored.success


def test_a_second_store_of_a_key_says_present_and_keeps_the_row(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    bench.store(tier, keys)
    again = bench.store(tier, keys, version=1)
    assert (again.outcomes, again.success) == (["present"], True)
    assert bench.load(tier, keys).success
    assert bench.holds(keys, version=0)


def test_an_empty_job_ends_at_once_with_success(bench: Any) -> None:
    tier = bench.open()
    tier.store(1, [], [])
    tier.load(2, [], [])
    results = {result.job_id: result for result in tier.poll()}
    assert {job: result.kind for job, result in results.items()} == {1: "store", 2: "load"}
    assert all(result.success and result.outcomes == [] for result in results.values())


def test_a_load_of_a_key_that_is_not_there_misses(bench: Any) -> None:
    tier = bench.open()
    missed = bench.load(tier, bench.keys([9]))
    assert (missed.outcomes, missed.success, missed.bytes) == (["miss"], False, 0)


def test_each_result_is_delivered_once(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys(range(8))
    offsets = bench.fill(keys)
    for job_id, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
        tier.store(job_id, [key], [offset])
    seen: list[int] = []
    while len(seen) < len(keys):
        results = tier.wait(10.0)
        assert results
        seen += [result.job_id for result in results]
    assert sorted(seen) == list(range(8))
    assert tier.poll() == []


def test_drain_returns_when_nothing_is_in_flight_and_leaves_the_results(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys(range(32))
    tier.store(1, keys, bench.fill(keys))
    tier.drain()
    [result] = tier.poll()
    assert result.outcomes == ["ok"] * 32
    tier.drain()


def test_wait_returns_nothing_when_the_time_is_up(bench: Any) -> None:
    tier = bench.open()
    begun = time.monotonic()
    assert tier.wait(0.25) == []
    assert 0.2 <= time.monotonic() - begun < 5.0
    assert tier.wait(0) == []


def test_wait_wakes_for_a_job_that_another_thread_submits(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    offsets = bench.fill(keys)
    timer = threading.Timer(0.2, lambda: tier.store(1, keys, offsets))
    timer.start()
    try:
        assert bench.wait(tier, 1).success
    finally:
        timer.join()


def test_fileno_becomes_readable_with_a_result_and_poll_clears_it(bench: Any) -> None:
    tier = bench.open()
    descriptor = tier.fileno()
    assert select.select([tier], [], [], 0) == ([], [], [])
    keys = bench.keys([1])
    tier.store(1, keys, bench.fill(keys))
    assert select.select([tier], [], [], 10.0) == ([tier], [], [])
    assert [result.job_id for result in tier.poll()] == [1]
    assert select.select([tier], [], [], 0) == ([], [], [])
    assert tier.fileno() == descriptor


def test_remove_hides_at_once_and_ignores_unknown_keys(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1, 2])
    bench.store(tier, keys)
    tier.remove([bench.key(77), keys[0], bench.key(1, group=5)])
    assert tier.lookup(keys) == [False, True]
    assert bench.load(tier, keys).outcomes == ["miss", "ok"]
    assert bench.store(tier, keys[:1], version=1).outcomes == ["ok"]
    assert bench.load(tier, keys[:1]).success
    assert bench.holds(keys[:1], version=1)


def test_touch_ignores_unknown_keys(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    bench.store(tier, keys)
    tier.touch([bench.key(77), *keys, bench.key(1, group=5)])
    assert tier.lookup([bench.key(77), *keys]) == [False, True]


def test_after_reset_nothing_is_found_and_new_rows_are_stored(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1, 2])
    bench.store(tier, keys)
    assert tier.reset() is True
    assert tier.lookup(keys) == [False, False]
    assert bench.load(tier, keys).outcomes == ["miss", "miss"]
    assert bench.store(tier, keys[:1], version=1).outcomes == ["ok"]
    assert bench.load(tier, keys[:1]).success
    assert bench.holds(keys[:1], version=1)


def test_reset_delivers_a_result_for_every_job_in_flight(bench: Any) -> None:
    tier = bench.open()
    stored = bench.keys(range(16))
    bench.store(tier, stored)
    offsets = bench.offsets(bench.keys(range(32)))
    tier.load(1, stored, offsets[:16])
    tier.store(2, bench.keys(range(100, 116)), offsets[16:])
    assert tier.reset() is True
    tier.drain()
    results = {result.job_id: result for result in tier.poll()}
    assert set(results[1].outcomes) <= {"ok", "miss"}
    assert set(results[2].outcomes) <= {"ok", "dropped"}
    assert tier.lookup(stored + bench.keys(range(100, 116))) == [False] * 32


def test_a_row_that_was_removed_or_reset_during_a_load_is_never_reported_wrong(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys(range(16))
    for _ in range(10):
        bench.store(tier, keys)
        offsets = bench.offsets(keys)
        tier.load(1, keys, offsets)
        tier.remove(keys)
        result = bench.wait(tier, 1)
        for key, offset, outcome in zip(keys, offsets, result.outcomes, strict=True):
            assert outcome in {"ok", "miss"}
            assert outcome == "miss" or bench.slot(key, offset) == bench.payload(key)


def test_stats_count_the_bytes_written_over_a_lifetime(bench: Any) -> None:
    tier = bench.open()
    before = tier.stats()
    bench.store(tier, bench.keys([1, 2]))
    bench.load(tier, bench.keys([1, 5]))
    after = tier.stats()
    assert after["bytes_stored"] - before["bytes_stored"] == 2 * 8192
    assert after["bytes_written"] - before["bytes_written"] >= 2 * 8192
    assert after["bytes_loaded"] - before["bytes_loaded"] == 8192
    assert after["store_outcomes"]["ok"] - before["store_outcomes"]["ok"] == 2
    assert after["load_outcomes"]["miss"] - before["load_outcomes"]["miss"] == 1


def test_stats_and_capabilities_are_plain_values(bench: Any) -> None:
    import json

    tier = bench.open()
    assert json.loads(json.dumps(tier.stats())) == tier.stats()
    capabilities = tier.capabilities()
    assert json.loads(json.dumps(capabilities)) == capabilities
    assert capabilities["io_backend"] in {"threads", "uring"}
    assert tier.stats()["io_backend"] == capabilities["io_backend"]
    assert capabilities["slot_align"] >= 1
    assert tier.busy_offsets() == []


def test_a_result_shows_what_it_holds_and_cannot_be_changed(bench: Any) -> None:
    tier = bench.open()
    result = bench.load(tier, bench.keys([1]))
    text = repr(result)
    for part in (f"job_id={result.job_id}", "kind='load'", "success=False", "outcomes=['miss']"):
        assert part in text
    with pytest.raises(AttributeError):
        result.success = True


def test_every_method_may_be_called_from_many_threads_at_once(bench: Any) -> None:
    tier = bench.open()
    errors: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            for turn in range(20):
                key = bench.key(lane * 1000 + turn % 5)
                offset = lane * bench.stride
                payload = bench.payload(key)
                bench.arena[offset : offset + len(payload)] = payload
                tier.store(lane * 1000 + turn, [key], [offset])
                tier.lookup([key])
                tier.touch([key])
                tier.stats()
                deadline = time.monotonic() + 20
                while lane * 1000 + turn not in finished and time.monotonic() < deadline:
                    with lock:
                        finished.update({r.job_id: r for r in tier.wait(0.05)})
                assert finished[lane * 1000 + turn].success
        except BaseException as error:  # noqa: BLE001 - any at all
            errors.append(error)

    lock = threading.Lock()
    finished: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    keys = [bench.key(lane * 1000 + turn) for lane in range(6) for turn in range(5)]
    assert bench.load(tier, keys).success
    assert bench.holds(keys)
