"""Slots that workers were copying to at a reset are kept until all of them have reported."""

from __future__ import annotations

from types import SimpleNamespace

from kvstrata.vllm.fence import ResetFence, pending_reports


def test_the_workers_are_done_when_every_rank_has_reported_every_job() -> None:
    done: list[int] = []
    fence = ResetFence(lambda: done.append(1))
    fence.raise_for({3: 2, 4: 1})
    fence.reported({3: 1})
    fence.reported({4: 1, 9: 1})
    assert not done
    fence.reported({3: 1})
    assert len(done) == 1
    fence.reported({3: 1})
    assert len(done) == 1


def test_without_jobs_in_flight_they_are_done_at_once() -> None:
    done: list[int] = []
    ResetFence(lambda: done.append(1)).raise_for({})
    assert len(done) == 1


def test_a_second_reset_waits_for_the_jobs_of_both() -> None:
    done: list[int] = []
    fence = ResetFence(lambda: done.append(1))
    fence.raise_for({1: 1})
    fence.raise_for({})
    assert not done
    fence.raise_for({2: 1})
    fence.reported({2: 1})
    assert not done
    fence.reported({1: 1})
    assert len(done) == 1


def test_what_is_pending_is_read_from_the_schedulers_jobs() -> None:
    jobs = {7: SimpleNamespace(pending_count=2), 8: SimpleNamespace(pending_count=1)}
    assert pending_reports(SimpleNamespace(_jobs=jobs)) == {7: 2, 8: 1}
