"""Random events through vLLM's scheduler, our connector, manager, workers and tiers.

New requests, steps, preemptions, aborts, resets (of what is below, of everything, twice in a row,
during loads), rows and loads that fail, tiers that fail or hang, reports in any order; see
`plugin_support/fuzz.py` for what is checked, and `plugin_support/modelless.py` for the bytes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.flaky_tier import FlakyTier
from plugin_support.fuzz import Fuzz
from plugin_support.modelless import Modelless, Shape

import kvstrata
from kvstrata.cli.demo.model import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Sabotage = Callable[[Modelless], None]
    Life = Callable[..., Fuzz]

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "open_tier"), reason="kvstrata._native is not built"
)
# How long a request waits for rows below.
WAIT_S = 0.3
# One group or two, ranks, blocks per chunk, a scheduler that runs ahead or not; tiers below.
SHAPES = (
    (Shape(layers=(2, 1), is_async=True), 1),
    (Shape(layers=(2,), ranks=2, slots=24, policy="th"), 2),
    (Shape(layers=(2, 1), blocks_per_chunk=2, slots=32, policy="s3fifo"), 1),
    (Shape(layers=(1, 2), ranks=2, is_async=True), 0),
)
# Every one of these has to have happened.
HAPPENED = (
    "HIT",
    "HIT_PENDING",
    "MISS",
    "abort",
    "blocks compared",
    "failed loads",
    "loads overtaken",
    "preempted",
    "prepare_load",
    "raised in poll",
    "refused",
    "reset_everything",
    "reset_twice",
    "resets done",
    "resets not done",
)
# These, in long lives.
SELDOM = (
    "busy slots",
    "no room",
    "raised in load",
    "raised in lookup",
    "raised in store",
    "resets failed",
    "rows failed",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model")).path


@pytest.fixture
def live(model: Path, engine_id: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """Lets an engine with the number live through so many events."""
    inner = kvstrata.open_tier
    opened: list[FlakyTier] = []

    def opener(url: str, *, row_bytes: Any, arena: Any, **options: Any) -> FlakyTier:
        native = inner(url, row_bytes=row_bytes, arena=arena, **options)
        opened.append(FlakyTier(native, row_bytes, arena))
        return opened[-1]

    monkeypatch.setattr(kvstrata, "open_tier", opener)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.CRITICAL)

    def run(number: int, events: int, sabotage: Sabotage = lambda _: None) -> Fuzz:
        opened.clear()
        shape, count = SHAPES[number % len(SHAPES)]
        tiers = []
        for tier in range(count):
            place = root / f"{number}.{tier}"
            place.mkdir(mode=0o700)
            tiers.append({"type": "disk", "url": place.as_uri(), "capacity": "1MiB", "min_free": 0})
        engine = Modelless(
            dataclasses.replace(shape, tiers=tuple(tiers), load_wait_s=WAIT_S),
            model,
            f"{engine_id}-{number}",
        )
        sabotage(engine)
        try:
            fuzz = Fuzz(engine, list(opened), number)
            fuzz.run(events)
        finally:
            engine.close()
        return fuzz

    return run


def check_all_happened(lives: list[Fuzz], names: tuple[str, ...] = HAPPENED) -> None:
    seen: Counter[str] = Counter()
    for fuzz in lives:
        for counts in (fuzz.seen, fuzz.reference.seen, fuzz.engine.seen):
            seen.update(counts)
        for native in fuzz.natives:
            seen.update(native.seen)
    assert not [name for name in names if not seen[name]]


@pytest.mark.timeout(600)
def test_random_lives_lose_no_pin_leak_no_slot_store_nothing_twice_and_show_no_stale_row(
    live: Life,
) -> None:
    check_all_happened([live(number, 1250) for number in range(4)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_events_do_neither(live: Life) -> None:
    check_all_happened([live(number, 2500) for number in range(4, 44)], HAPPENED + SELDOM)


def keep_what_was_loaded(engine: Modelless) -> None:
    engine.manager.complete_load = lambda *_: None


def hear_of_no_refusal(engine: Modelless) -> None:
    engine.manager.rows_refused = lambda _: None


def keep_rows_over_a_reset(engine: Modelless) -> None:
    engine.manager.reset_cache = lambda: None


def store_below_twice(engine: Modelless) -> None:
    for tier in engine.tiers:
        tier.store = lambda slots, store=tier.store: (store(slots), store(slots))


def give_busy_slots_away(engine: Modelless) -> None:
    for tier in engine.tiers:
        tier.native.busy_offsets = list


def take_failed_loads_for_good(engine: Modelless) -> None:
    for worker in engine.workers:
        worker._row_worker.take_failed_loads = frozenset


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sabotage", "complaint"),
    [
        (keep_what_was_loaded, "slots stay taken"),
        (hear_of_no_refusal, "took is a hit|refused is a hit|hold"),
        (keep_rows_over_a_reset, "reset or a worker took is a hit|was there"),
        (store_below_twice, "stored to one tier twice|faults"),
        (give_busy_slots_away, "in use by a busy|hold"),
        (take_failed_loads_for_good, "hold"),
    ],
)
def test_a_manager_that_is_broken_is_found_out(
    live: Life, sabotage: Sabotage, complaint: str
) -> None:
    def lives() -> None:
        for number in range(8):
            live(number, 2500, sabotage)

    with pytest.raises(AssertionError, match=complaint):
        lives()
