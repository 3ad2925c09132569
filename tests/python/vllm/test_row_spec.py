"""The description of a job's rows: what it holds, and how it travels."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LoadStoreSpec, make_offload_key

from kvstrata.vllm.rowspec import UNKNOWN, RowSpec


def rows(count: int) -> RowSpec:
    return RowSpec(
        [
            make_offload_key(bytes([number]) * (16 + number % 49), number % 3)
            for number in range(count)
        ],
        groups=[number % 3 for number in range(count)],
        chunks=[UNKNOWN if number == 1 else number for number in range(count)],
        offsets=[number * 2**33 for number in range(count)],
    )


@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_row_spec_arrives_as_it_was_sent(count: int, protocol: int) -> None:
    sent = rows(count)
    came = pickle.loads(pickle.dumps(sent, protocol))  # noqa: S301 -- made in the line itself
    assert came == sent
    assert isinstance(came, LoadStoreSpec)
    assert came.keys == sent.keys
    for name, kind in (("groups", np.int32), ("chunks", np.int64), ("offsets", np.int64)):
        assert getattr(came, name).dtype == kind
        assert getattr(came, name).tolist() == getattr(sent, name).tolist()


def test_a_row_travels_in_its_key_and_two_dozen_bytes() -> None:
    small, large = (len(pickle.dumps(rows(count))) for count in (100, 200))
    keys = sum(map(len, rows(200).keys)) - sum(map(len, rows(100).keys))
    assert large - small - keys <= 24 * 100 + 16


def test_what_was_sent_does_not_change_with_the_senders_arrays() -> None:
    offsets = np.array([64], dtype=np.int64)
    spec = RowSpec([b"k" * 36], [0], [0], offsets)
    offsets[0] = 0
    assert spec.offsets.tolist() == [64]
    assert spec != RowSpec([b"k" * 36], [0], [0], [0])


@pytest.mark.parametrize("short", ["groups", "chunks", "offsets"])
def test_lists_of_unequal_length_are_refused(short: str) -> None:
    parts = {"groups": [0, 0], "chunks": [0, 1], "offsets": [0, 64]}
    with pytest.raises(ValueError, match="2 keys"):
        RowSpec([b"a" * 36, b"b" * 36], **{**parts, short: [0]})
