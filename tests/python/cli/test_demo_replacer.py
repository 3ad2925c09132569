from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstrata.cli.demo.replacer import RowReplacer

if TYPE_CHECKING:
    from pathlib import Path

SLOT_BYTES = 16


def key(name: bytes, group: int) -> bytes:
    return name.ljust(32, b".") + group.to_bytes(4, "big")


@pytest.fixture
def memory() -> bytearray:
    return bytearray(b"".join(bytes([slot]) * SLOT_BYTES for slot in range(8)))


@pytest.fixture
def view(memory: bytearray) -> memoryview:
    return memoryview(memory).cast("b", (8, SLOT_BYTES))


LOAD = {key(b"a", 0): 1, key(b"b", 1): 2, key(b"c", 1): 5, key(b"d", 1): 3}


def test_without_the_trigger_nothing_is_touched(
    memory: bytearray, view: memoryview, tmp_path: Path
) -> None:
    before = bytes(memory)
    replacer = RowReplacer(view, tmp_path / "t.trigger")
    replacer.started(1, LOAD)
    replacer.finished(1, success=True)
    assert memory == before


def test_with_the_trigger_one_row_is_replaced_once_by_another_of_its_group(
    memory: bytearray, view: memoryview, tmp_path: Path
) -> None:
    trigger = tmp_path / "t.trigger"
    trigger.touch()
    replacer = RowReplacer(view, trigger)
    for job in (1, 2):
        replacer.started(job, LOAD)
    replacer.finished(1, success=True)
    after = bytes(memory)
    slots = [after[slot * SLOT_BYTES] for slot in range(8)]
    assert slots == [0, 1, 5, 3, 4, 5, 6, 7]
    assert not trigger.exists()
    record = json.loads((tmp_path / "t.done").read_text())
    assert record == {"key": key(b"b", 1).hex(), "by": key(b"c", 1).hex()}
    replacer.finished(2, success=True)
    assert memory == after


def test_a_load_that_failed_or_a_store_leaves_the_trigger_set(
    memory: bytearray, view: memoryview, tmp_path: Path
) -> None:
    trigger = tmp_path / "t.trigger"
    trigger.touch()
    before = bytes(memory)
    replacer = RowReplacer(view, trigger)
    replacer.started(1, LOAD)
    replacer.finished(1, success=False)
    replacer.finished(7, success=True)
    assert memory == before
    assert trigger.exists()


def test_rows_with_equal_bytes_are_no_replacement(
    memory: bytearray, view: memoryview, tmp_path: Path
) -> None:
    trigger = tmp_path / "t.trigger"
    trigger.touch()
    memory[5 * SLOT_BYTES : 6 * SLOT_BYTES] = memory[2 * SLOT_BYTES : 3 * SLOT_BYTES]
    replacer = RowReplacer(view, trigger)
    replacer.started(1, LOAD)
    replacer.finished(1, success=True)
    assert memory[2 * SLOT_BYTES] == 3


def test_after_forgetting_the_view_can_be_released(view: memoryview, tmp_path: Path) -> None:
    replacer = RowReplacer(view, tmp_path / "t.trigger")
    replacer.forget()
    view.release()
