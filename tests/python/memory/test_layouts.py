"""Every layout, both forms of slots, any jobs: all bytes compared with a plain-Python reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_support.reference import POISON, Engine, Part
from memory_support.shapes import BLOCKS, SHAPES, Layer, Shape, Tensor

from kvstrata.memory.layout import ExactLayout, LayoutError, PageRef

ALIGN = 64
by_name = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
forms = pytest.mark.parametrize("exact", [True, False], ids=["exact", "uniform"])
any_jobs = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Slots:
    """Hands out places of an arena, and takes them back for rows of any group."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.live: dict[int, int] = {}  # first byte -> group

    def take(self, group: int, draw: st.DataObject) -> int | None:
        size = self.engine.slot_bytes(group)
        step = ALIGN if self.engine.exact else size
        taken = [(at, at + self.engine.slot_bytes(of)) for at, of in self.live.items()]
        free = [
            at
            for at in range(0, self.engine.arena_bytes - size + 1, step)
            if all(at >= stop or at + size <= start for start, stop in taken)
        ]
        if not free:
            return None
        at = draw.draw(st.sampled_from(free), label="slot")
        self.live[at] = group
        return at


def draw_store(engine: Engine, slots: Slots, draw: st.DataObject) -> list[Part]:
    parts = []
    for group in range(len(engine.shape.groups)):
        chunks = draw.draw(st.integers(0, 2), label="chunks")
        places = [at for at in (slots.take(group, draw) for _ in range(chunks)) if at is not None]
        if not places:
            continue
        skip = draw.draw(st.integers(0, engine.per_chunk - 1), label="skip")
        cut = draw.draw(st.integers(0, engine.per_chunk - 1), label="cut")
        count = max(1, len(places) * engine.per_chunk - skip - cut)
        if -(-(skip + count) // engine.per_chunk) != len(places):
            count = len(places) * engine.per_chunk - skip
        blocks = draw.draw(
            st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count), label="blocks"
        )
        parts.append(Part(group, skip, blocks, places))
    return parts


def draw_load(engine: Engine, slots: Slots, draw: st.DataObject) -> list[Part]:
    parts = []
    # Groups have blocks of their own: two groups of one job never name the same one.
    free = list(draw.draw(st.permutations(range(BLOCKS)), label="blocks"))
    for group in range(len(engine.shape.groups)):
        mine = [at for at, of in slots.live.items() if of == group]
        places = mine[: draw.draw(st.integers(0, len(mine)), label="rows")]
        skip = draw.draw(st.integers(0, engine.per_chunk - 1), label="skip") if places else 0
        count = min(len(places) * engine.per_chunk - skip, len(free))
        places = places[: -(-(skip + count) // engine.per_chunk)]
        if count > 0:
            parts.append(Part(group, skip, [free.pop() for _ in range(count)], places))
    return parts


@by_name
@forms
@any_jobs
@given(data=st.data())
def test_every_byte_is_where_the_reference_has_it(
    shape: Shape, exact: bool, device: torch.device, data: st.DataObject
) -> None:
    per_chunk = data.draw(st.sampled_from([1, 2, 3]), label="blocks_per_chunk")
    engine = Engine(shape, per_chunk, 1, device, exact=exact)
    largest = max(engine.slot_bytes(group) for group in range(len(shape.groups)))
    engine = Engine(
        shape,
        per_chunk,
        5 * largest + 7,
        device,
        exact=exact,
        seed=data.draw(st.integers(0, 99)),
        never_across=data.draw(st.sampled_from([None, 24, 100])),
    )
    slots = Slots(engine)
    for step in range(data.draw(st.integers(1, 5), label="steps")):
        engine.store(draw_store(engine, slots, data))
        engine.check()
        engine.scramble(step)
        engine.load(draw_load(engine, slots, data))
        engine.check()
        # A slot that is given up goes to whichever group asks next.
        for at in data.draw(st.sets(st.sampled_from(sorted(slots.live) or [0])), label="given up"):
            slots.live.pop(at, None)


@by_name
@forms
def test_a_row_given_to_another_group_keeps_nothing_of_the_one_before(
    shape: Shape, exact: bool, device: torch.device
) -> None:
    engine = Engine(shape, 3, 4096, device, exact=exact)
    for group in range(len(shape.groups)):
        engine.arena.fill_(POISON)
        engine.model_arena[:] = bytes([POISON]) * len(engine.model_arena)
        engine.store([Part(group, 2, [5], [0])])
        engine.check()
        size = engine.slot_bytes(group)
        row = engine.arena[:size].numpy().tobytes()
        payload = sum(layer.row_size for layer in shape.groups[group])
        # What is not the one block is zero, in every rank's part.
        assert row.count(0) >= size - payload * shape.parts
        assert set(engine.arena[size:].tolist()) == {POISON}


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if len(shape.groups) == 1 and "padded" not in shape.name],
    ids=lambda shape: shape.name,
)
def test_a_model_with_one_group_has_equal_rows_in_both_forms(
    shape: Shape, per_chunk: int, device: torch.device
) -> None:
    unpadded = all(
        layer.row_size == Engine(shape, per_chunk, 1, device, exact=False).slot_page(layer.tensor)
        for layer in shape.groups[0]
    )
    rows = []
    for exact in (True, False):
        engine = Engine(shape, per_chunk, 4096, device, exact=exact)
        engine.store([Part(0, 0, [4, 1, 7][:per_chunk], [0])])
        rows.append(engine.arena[: engine.slot_bytes(0)].numpy().tobytes())
    assert (rows[0] == rows[1]) is unpadded


def test_a_row_takes_what_its_group_needs_and_not_a_byte_more() -> None:
    shape = next(shape for shape in SHAPES if shape.name == "ten layers and four")
    layout = ExactLayout(
        blocks_per_chunk=2,
        groups=shape.refs(0),
        block_page_bytes=tuple(t.page for t in shape.tensors),
        rank=1,
        ranks=2,
    )
    layout.check()
    assert [layout.row_bytes(group) for group in range(2)] == [2 * 2 * 320, 2 * 2 * 128]
    assert [layout.rank_bytes(group) for group in range(2)] == [2 * 320, 2 * 128]
    assert [row.area.start for row in layout.rows] == [640, 256]
    assert not layout.gaps(0, range(2))


@pytest.mark.parametrize(
    "layout",
    [
        ExactLayout(1, ((PageRef(1, 8),),), (64,)),
        ExactLayout(1, ((PageRef(0, 65),),), (64,)),
        ExactLayout(1, ((PageRef(0, 60, 8),),), (64,)),
        ExactLayout(0, ((PageRef(0, 64),),), (64,)),
        ExactLayout(1, ((PageRef(0, 64),),), (64,), rank=1, ranks=1),
    ],
)
def test_an_exact_layout_that_does_not_hold_together_is_refused(layout: ExactLayout) -> None:
    with pytest.raises(LayoutError):
        layout.check()


def test_a_group_without_pages_takes_no_byte() -> None:
    shape = Shape("an empty group", (Tensor(32, 32),), ((), (Layer(0, 32),)))
    engine = Engine(shape, 2, 256, torch.device("cpu"))
    engine.store([Part(0, 0, [3, 4], [0]), Part(1, 0, [5, 6], [0])])
    engine.check()


def test_a_block_may_be_stored_twice_by_one_job(device: torch.device) -> None:
    for shape, exact in itertools.product(SHAPES, (True, False)):
        engine = Engine(shape, 3, 4096, device, exact=exact)
        engine.store([Part(0, 0, [3, 3, 5], [0])])
        engine.check()
