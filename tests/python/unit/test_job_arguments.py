"""What a tier's methods refuse: each wrong argument raises a ValueError that names it."""

import array
from collections.abc import Callable
from typing import Any

import pytest

import kvstrata


def refused(match: str) -> Any:
    return pytest.raises(kvstrata.ArgumentError, match=match)


@pytest.fixture(params=["store", "load"])
def call(request: pytest.FixtureRequest, bench: Any) -> Callable[..., None]:
    tier = bench.open()
    method: Callable[..., None] = getattr(tier, request.param)
    return method


def test_a_wrong_argument_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(kvstrata.ArgumentError, ValueError)
    assert issubclass(kvstrata.ArgumentError, kvstrata.KVStrataError)


def test_an_unknown_group_is_refused(bench: Any, call: Any) -> None:
    with refused(r"group 7"):
        call(1, [bench.key(1), bench.key(2, group=7)], [0, 8192])


@pytest.mark.parametrize(
    "offset", [64 * 8192, 63 * 8192 + 1, 2**63, 2**64 - 1, 2**64 - 8192], ids=hex
)
def test_a_slot_past_the_arenas_end_is_refused(bench: Any, call: Any, offset: int) -> None:
    with refused(r"offsets\[1\]"):
        call(1, bench.keys([1, 2]), [0, offset])


def test_the_last_slot_is_accepted(bench: Any) -> None:
    tier = bench.open()
    tier.store(1, [bench.key(1)], [63 * 8192])
    assert bench.wait(tier, 1).outcomes == ["ok"]


@pytest.mark.parametrize("offset", [-1, 2**64, 1.5, "0", None], ids=repr)
def test_an_offset_that_is_no_offset_is_refused(bench: Any, call: Any, offset: object) -> None:
    with refused(r"offsets\[1\]"):
        call(1, bench.keys([1, 2]), [0, offset])


def test_a_negative_offset_in_an_array_is_refused(bench: Any, call: Any) -> None:
    with refused(r"offsets\[1\] is -8192"):
        call(1, bench.keys([1, 2]), array.array("q", [0, -8192]))


@pytest.mark.parametrize("offsets", [7, None, b"\0\0", "00"], ids=repr)
def test_offsets_that_are_no_sequence_of_ints_are_refused(
    bench: Any, call: Any, offsets: object
) -> None:
    with refused("offsets"):
        call(1, bench.keys([1, 2]), offsets)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_keys_and_offsets_of_different_lengths_are_refused(
    bench: Any, call: Any, count: int
) -> None:
    with refused("length"):
        call(1, bench.keys([1, 2]), [8192 * n for n in range(count)])


def test_a_key_twice_in_one_job_is_refused(bench: Any, call: Any) -> None:
    with refused(r"keys\[2\]"):
        call(1, bench.keys([1, 2, 1]), [0, 8192, 16384])


def test_an_offset_twice_in_one_job_is_refused(bench: Any, call: Any) -> None:
    with refused(r"offsets\[2\]"):
        call(1, bench.keys([1, 2, 3]), [0, 8192, 0])


@pytest.mark.parametrize("job_id", [-1, 2**64, 1.5, "1", None], ids=repr)
def test_a_job_id_that_is_no_number_of_64_bits_is_refused(
    bench: Any, call: Any, job_id: object
) -> None:
    with refused("job_id"):
        call(job_id, [bench.key(1)], [0])


def test_a_job_id_in_flight_or_unpolled_is_refused_and_free_after_the_poll(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1])
    tier.store(5, keys, bench.fill(keys))
    with refused("5 is in flight|5 is not polled"):
        tier.store(5, bench.keys([2]), [8192])
    tier.drain()
    with refused("5 is not polled"):
        tier.load(5, keys, [0])
    assert bench.wait(tier, 5).success
    tier.load(5, keys, [0])
    assert bench.wait(tier, 5).success


def test_the_largest_job_id_comes_back_as_given(bench: Any) -> None:
    tier = bench.open()
    tier.store(2**64 - 1, [], [])
    assert bench.wait(tier, 2**64 - 1).kind == "store"


@pytest.mark.parametrize("length", [0, 4, 19, 69, 1000])
def test_a_key_of_a_wrong_length_is_refused_with_its_position(
    bench: Any, call: Any, length: int
) -> None:
    with refused(rf"keys\[1\].*{length} bytes"):
        call(1, [bench.key(1), bytes(length)], [0, 8192])


@pytest.mark.parametrize("name", ["lookup", "touch", "remove"])
def test_methods_that_take_keys_refuse_what_is_no_key(bench: Any, name: str) -> None:
    method = getattr(bench.open(), name)
    with refused(r"keys\[1\]"):
        method([bench.key(1), "text"])
    with refused(r"keys\[0\]"):
        method([b"short"])
    for keys in (bench.key(1), "text", 5, None):
        with refused("keys"):
            method(keys)


def test_a_refused_job_leaves_no_result_behind(bench: Any) -> None:
    tier = bench.open()
    with refused(r"keys\[1\]"):
        tier.store(1, [bench.key(1), bench.key(1)], [0, 8192])
    assert tier.wait(0.05) == []
    assert tier.lookup([bench.key(1)]) == [False]
    tier.store(1, [bench.key(1)], [0])
    assert bench.wait(tier, 1).success


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", None], ids=repr)
def test_a_timeout_that_is_no_time_is_refused(bench: Any, timeout: Any) -> None:
    tier = bench.open()
    with refused("timeout_s"):
        tier.wait(timeout)
    with refused("timeout_s"):
        tier.close(timeout)
    assert tier.lookup([]) == []


@pytest.mark.parametrize("length", [20, 36, 68])
def test_keys_of_every_hash_length_are_told_apart(bench: Any, length: int) -> None:
    tier = bench.open()
    keys = [bytes([n]) * (length - 4) + bytes(4) for n in range(3)]
    assert bench.store(tier, keys).outcomes == ["ok"] * 3
    assert bench.load(tier, keys).success
    assert bench.holds(keys)


def test_keys_may_be_any_buffer_of_bytes_and_offsets_any_sequence_of_ints(bench: Any) -> None:
    tier = bench.open()
    keys = bench.keys([1, 2, 3])
    bench.fill(keys)
    mixed = (keys[0], bytearray(keys[1]), memoryview(keys[2]))
    tier.store(1, mixed, array.array("Q", [0, 8192, 16384]))
    assert bench.wait(tier, 1).success
    tier.load(2, iter(keys), (0, 8192, 16384))
    assert bench.wait(tier, 2).success
    tier.load(3, keys, array.array("i", [0, 8192, 16384]))
    assert bench.wait(tier, 3).success
