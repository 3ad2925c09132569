"""Registering memory piece by piece, with registrars that refuse, are slow, or come late."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvstrata.memory import pinning as pinning_module
from kvstrata.memory.pinning import SMALLEST_PIECE, Pinning, loaded_runtime

UNIT = 64


class Registrar:
    """Refuses pieces larger than `limit`, and everything from the `fails_at`-th piece on."""

    def __init__(self, limit: int = 1 << 60, fails_at: int = 1 << 60) -> None:
        self.limit, self.fails_at = limit, fails_at
        self.held: dict[int, int] = {}
        self.asked: list[int] = []
        self.gate = threading.Semaphore(1 << 20)

    def register(self, address: int, nbytes: int) -> bool:
        self.gate.acquire()
        self.asked.append(nbytes)
        if nbytes > self.limit or len(self.held) >= self.fails_at:
            return False
        self.held[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.held[address]


def pinning(registrar: Registrar | None, nbytes: int, **options: object) -> Pinning:
    return Pinning(1 << 20, nbytes, registrar, largest=16 * UNIT, smallest=UNIT, **options)  # type: ignore[arg-type]


def test_the_exact_size_is_registered_in_pieces_that_begin_at_whole_units() -> None:
    registrar = Registrar()
    nbytes = 40 * UNIT + 7
    made = pinning(registrar, nbytes)
    assert made.wait(10)
    assert made.pinned_bytes == nbytes
    assert registrar.held == {
        1 << 20: 16 * UNIT,
        (1 << 20) + 16 * UNIT: 16 * UNIT,
        (1 << 20) + 32 * UNIT: 8 * UNIT + 7,
    }
    made.close()
    assert not registrar.held
    assert made.pinned_bytes == 0


def test_a_device_that_refuses_large_pieces_gets_smaller_ones() -> None:
    registrar = Registrar(limit=5 * UNIT)
    made = pinning(registrar, 20 * UNIT)
    assert made.wait(10)
    assert registrar.asked == [16 * UNIT, 8 * UNIT, *[4 * UNIT] * 5]
    assert made.pinned_bytes == 20 * UNIT
    assert all((address - (1 << 20)) % UNIT == 0 for address in registrar.held)
    made.close()


def test_what_is_registered_before_a_refusal_stays_and_the_rest_is_named_in_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = Registrar(fails_at=2)
    with caplog.at_level(logging.WARNING):
        made = pinning(registrar, 64 * UNIT)
        assert made.wait(10)
    assert made.pinned_bytes == 32 * UNIT
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"kvstrata: {32 * UNIT} of {64 * UNIT} bytes of the arena are pinned")
    made.close()
    assert not registrar.held


def test_the_first_piece_is_there_long_before_the_last() -> None:
    registrar = Registrar()
    registrar.gate = threading.Semaphore(1)
    made = pinning(registrar, 20 * 16 * UNIT)
    assert made.wait_first(10)
    assert made.pinned_bytes == 16 * UNIT
    seen = []
    for _ in range(19):
        registrar.gate.release()
        while made.pinned_bytes == (seen[-1] if seen else 16 * UNIT):
            pass
        seen.append(made.pinned_bytes)
    assert seen == [16 * UNIT * count for count in range(2, 21)]
    assert made.wait(10)
    made.close()


def test_closing_in_the_middle_undoes_what_was_done() -> None:
    registrar = Registrar()
    registrar.gate = threading.Semaphore(2)
    made = pinning(registrar, 1000 * 16 * UNIT)
    while made.pinned_bytes < 2 * 16 * UNIT:
        pass
    registrar.gate.release(1)
    made.close()
    assert not registrar.held
    assert len(registrar.asked) < 10


def test_a_registrar_that_raises_leaves_the_memory_pageable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Registrar):
        def register(self, address: int, nbytes: int) -> bool:
            msg = f"no device for {nbytes} bytes at {address}"
            raise OSError(msg)

    made = pinning(Broken(), 4 * UNIT)
    assert made.wait_first(10)
    assert made.wait(10)
    assert made.pinned_bytes == 0
    assert "stays pageable" in caplog.text
    made.close()


def test_without_a_device_nothing_is_registered_and_nothing_breaks() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    memory = torch.zeros(1 << 16, dtype=torch.int8)
    found = loaded_runtime()
    assert found is None or not found.register(memory.data_ptr(), 1 << 16)


def test_to_close_waits_for_no_more_than_the_smallest_piece_that_is_taken() -> None:
    taken: list[tuple[int, int]] = []
    may_go_on, begun = threading.Event(), threading.Event()

    def take(offset: int, nbytes: int) -> None:
        taken.append((offset, nbytes))
        if len(taken) == 3:
            begun.set()
            assert may_go_on.wait(60)

    pinning = Pinning(0, 8 * SMALLEST_PIECE, None, take=take)
    assert begun.wait(60)
    closing = threading.Thread(target=pinning.close)
    closing.start()
    while not pinning._stop.is_set():
        time.sleep(0.001)
    may_go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert taken == [(n * SMALLEST_PIECE, SMALLEST_PIECE) for n in range(3)]


def test_all_of_an_odd_size_is_taken_once() -> None:
    taken: list[tuple[int, int]] = []
    pinning = Pinning(
        0, 250, None, take=lambda *piece: taken.append(piece), largest=100, smallest=30
    )
    assert pinning.wait(60)
    pieces = [(0, 30), (30, 30), (60, 30), (90, 10), (100, 30), (130, 30), (160, 30), (190, 10)]
    assert taken == [*pieces, (200, 30), (230, 20)]


def test_pieces_wait_for_the_process_that_takes_their_memory() -> None:
    registrar = Registrar()
    end, asked = [0], threading.Event()

    def is_taken(wanted: int) -> bool:
        asked.set()
        return end[0] >= wanted

    made = pinning(registrar, 40 * UNIT, is_taken=is_taken)
    assert asked.wait(10)
    assert not made.wait_first(0.1)
    end[0] = 31 * UNIT
    assert made.wait_first(10)
    asked.clear()
    assert asked.wait(10)
    assert made.pinned_bytes == 16 * UNIT
    end[0] = 40 * UNIT
    assert made.wait(10)
    assert made.pinned_bytes == 40 * UNIT
    made.close()


def test_to_wait_for_a_process_that_never_takes_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = pinning(Registrar(), 40 * UNIT, is_taken=lambda _end: False)
    made.close()
    assert made.pinned_bytes == 0
    monkeypatch.setattr(pinning_module, "AWAIT_SECONDS_MAX", 0.05)
    made = pinning(Registrar(), 40 * UNIT, is_taken=lambda _end: False)
    assert made.wait(10)
    assert made.pinned_bytes == 40 * UNIT
    made.close()
