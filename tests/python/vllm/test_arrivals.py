"""Requests that policies are told of: once, when they come, with all keys; and how they end."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from plugin_support.known_bytes import BLOCK, Text
from plugin_support.modelless import Modelless, Shape
from plugin_support.own_manager import ROWS, TOKENS, Stack, keys_of
from vllm.v1.kv_offload.base import Medium, ScheduleEndContext, TierFilter, TierMatcher
from vllm.v1.request import RequestStatus

import kvstrata
from kvstrata.cli import main as entry
from kvstrata.cli.demo.model import make_model
from kvstrata.vllm import arrivals, exact
from kvstrata.vllm.arrivals import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"),
    pytest.mark.timeout(300),
]
SETTLE_S = 100.0


class Told:
    """A native tier; keeps what it is told of requests."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.open: dict[str, tuple[list[bytes], dict[str, Any]]] = {}
        self.ended: list[tuple[list[bytes], int | None]] = []

    def observe(self, name: str, keys: Any, **known: Any) -> None:
        assert name not in self.open, "a request is told of twice"
        self.open[name] = (list(keys), known)
        self.native.observe(name, keys, **known)

    def finish(self, name: str, output_tokens: int | None) -> None:
        self.ended.append((self.open.pop(name)[0], output_tokens))
        self.native.finish(name, output_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


class Engine:
    """vLLM's scheduler over our connector and one tier on disk, without a model."""

    def __init__(self, made: Modelless, told: Told) -> None:
        self.made = made
        self.told = told

    def cpu(self, field: str) -> int:
        return int(self.made.manager.cpu.stats()[field])

    def add(self, prompt: list[int], max_tokens: int = 2) -> str:
        groups = len(self.made.shape.layers)
        return self.made.add(Text(prompt, len(prompt) + max_tokens + BLOCK, groups), max_tokens)

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not self.made.is_idle:
            self.made.step()
            assert time.monotonic() < deadline, "never idle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model")).path


@pytest.fixture
def start(
    model: Path, engine_id: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    inner = kvstrata.open_tier
    opened: list[Told] = []
    started: list[Modelless] = []

    def opener(url: str, **options: Any) -> Told:
        opened.append(Told(inner(url, **options)))
        return opened[-1]

    monkeypatch.setattr(exact.kvstrata, "open_tier", opener)

    def run(tier: dict[str, Any] | None = None, **shape: Any) -> Engine:
        place = {"type": "disk", "url": root.as_uri(), "capacity": "4MiB", "min_free": 0}
        root.chmod(0o700)
        tiers = ({**place, **(tier or {})},)
        started.append(Modelless(Shape(tiers=tiers, **shape), model, engine_id))
        return Engine(started[-1], opened[-1])

    yield run
    for one in started:
        assert one.manager.faults.total == 0
        assert not any(tier.faults.total for tier in one.tiers)
        one.close()


def test_a_request_is_told_of_when_it_arrives_with_every_key_of_its_prompt(
    start: Callable[..., Engine],
) -> None:
    engine = start(layers=(2, 1))
    engine.add(list(range(3, 3 + 6 * BLOCK + 1)), max_tokens=5)
    # Nothing was scheduled yet.
    ((keys, known),) = engine.told.open.values()
    groups = [int.from_bytes(key[-4:], "big") for key in keys]
    assert groups == [0] * 6 + [1] * 6
    assert known == {"prompt_tokens": 6 * BLOCK + 1, "new_tokens": None, "hint": None}
    assert engine.cpu("observed_requests") == 1
    engine.settle()
    ((told, output_tokens),) = engine.told.ended
    assert (told, output_tokens) == (keys, 5)
    assert engine.cpu("observed_requests") == engine.cpu("awaited_requests") == 0


def test_the_next_turn_waits_for_its_rows_which_stay_until_it_runs(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    prompt = list(range(3, 3 + 6 * BLOCK))
    engine.add(prompt)
    engine.settle()
    engine.add([*prompt, 7, 8, 9])
    assert engine.cpu("awaited_requests") == 1
    assert engine.cpu("awaited_bytes") == 6 * engine.made.shape.row_bytes[0]
    engine.settle()
    assert engine.cpu("awaited_requests") == engine.cpu("awaited_bytes") == 0
    assert [tokens for _, tokens in engine.told.ended] == [2, 2]


def test_requests_that_are_aborted_reset_or_preempted_leave_nothing_behind(
    start: Callable[..., Engine],
) -> None:
    engine = start(blocks=24, slots=24)
    prompts = [list(range(at, at + 7 * BLOCK)) for at in range(3, 48, 9)]
    names = [engine.add(prompt, max_tokens=20) for prompt in prompts]
    engine.made.scheduler.finish_requests(names[0], RequestStatus.FINISHED_ABORTED)
    for step in itertools.count():
        engine.made.step()
        if step == 12:
            engine.made.scheduler.finish_requests(names[1], RequestStatus.FINISHED_ABORTED)
        if step == 6:
            engine.made.reset(running=False)
        if engine.made.is_idle:
            break
    assert engine.made.seen["preempted"] > 0
    assert not engine.told.open
    assert len(engine.told.ended) == len(prompts)
    assert engine.cpu("observed_requests") == 0
    assert engine.cpu("awaited_requests") == engine.cpu("awaited_bytes") == 0
    assert engine.cpu("rows_in_use") == 0


def test_an_engine_that_records_makes_a_trace_that_the_simulator_reads(
    start: Callable[..., Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, out = tmp_path / "recordings", tmp_path / "trace.jsonl"
    engine = start(record=str(kept))
    prompt = list(range(3, 3 + 6 * BLOCK))
    engine.add(prompt, max_tokens=2 * BLOCK)
    engine.settle()
    engine.add([*prompt, 7, 8, 9, 10, 11], max_tokens=1)
    aborted = engine.add(list(range(50, 50 + 2 * BLOCK)))
    engine.made.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
    engine.settle()
    engine.made.connector.shutdown()
    for path in kept.glob("*.kvrec"):
        assert not any(str(prompt)[1:20] in line for line in path.read_text().splitlines())
    assert entry.main(["record", str(kept), "--out", str(out)]) == 0
    capsys.readouterr()
    header, *requests = map(json.loads, out.read_text().splitlines())
    assert (header["block_tokens"], header["unique_blocks"]) == (BLOCK, 9)
    found = sorted((line["r"], line["o"]) for line in requests)
    assert found == [([0, 6], 2 * BLOCK), ([0, 7], 1), ([7, 2], 0)]
    command = ["simulate", "--trace", str(out), "--capacity", "9", "--policy", "th", "--json"]
    assert entry.main(command) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["requested"], told["hits"]) == (15, 6)


def test_rows_that_a_tier_did_not_take_are_offered_again_to_who_has_them(
    start: Callable[..., Engine],
) -> None:
    engine = start(tier={"store_threshold": 2})
    prompt = list(range(3, 3 + 6 * BLOCK))
    engine.add(prompt, max_tokens=1)
    engine.settle()
    assert engine.told.stats()["unadmitted_stores"] == 6
    assert engine.told.stats()["rows"] == 0
    # All of it is on the GPU and in the CPU tier: nothing is loaded, and nothing stored.
    engine.add(prompt, max_tokens=1)
    engine.settle()
    assert engine.told.stats()["rows"] == 6


def test_rows_are_offered_again_until_a_tier_that_is_behind_takes_them(
    start: Callable[..., Engine],
) -> None:
    engine = start(tier={"store_threshold": 2})
    (tier,) = engine.made.tiers
    prompt = list(range(3, 3 + 6 * BLOCK))
    engine.add(prompt, max_tokens=1)
    engine.settle()
    limit, tier.store_bytes_max = tier.store_bytes_max, 0
    engine.add(prompt, max_tokens=1)
    engine.settle()
    assert (tier.skipped_stores, engine.told.stats()["rows"]) == (1, 0)
    tier.store_bytes_max = limit
    engine.add(prompt, max_tokens=1)
    engine.settle()
    assert engine.told.stats()["rows"] == 6


@pytest.fixture
def stack() -> Iterator[Stack]:
    made = Stack(slots=4).open()
    yield made
    made.manager.shutdown()
    assert made.manager.faults.total == 0


def observe(stack: Stack, keys: list[Any], **context: Any) -> Any:
    made = stack.request(keys, **context)
    stack.manager.observe(made, Arrival((keys,), prompt_tokens=len(keys) * TOKENS))
    return made


def test_the_head_that_a_request_has_on_the_gpu_stays_with_what_it_loads(stack: Stack) -> None:
    # Slots of 8 KiB: four rows of group 0.
    stack.store(keys_of(range(2)))
    stack.store(keys_of(range(10, 12)))
    turn = observe(stack, keys_of(range(2)))
    # The first row is on the GPU: only the second is asked for, and loaded.
    second = keys_of([1])
    stack.ask(second, turn)
    stack.manager.prepare_load(second, turn)
    stack.step()
    stack.manager.complete_load(set(second), turn)
    stack.manager.on_request_finished(turn)
    stack.store(keys_of(range(20, 22)))
    found = stack.cpu.lookup([*keys_of(range(2)), *keys_of(range(10, 12))])
    assert found == [True, True, False, False]


def test_a_request_that_may_not_load_from_the_cpu_tier_keeps_nothing_there(stack: Stack) -> None:
    stack.store(keys_of(range(2)))
    storage = TierFilter((TierMatcher(Medium.STORAGE),))
    context = observe(stack, keys_of(range(2)), load_tier_filter=storage)
    stats = stack.cpu.stats()
    assert (stats["observed_requests"], stats["awaited_requests"]) == (0, 0)
    stack.manager.on_request_finished(context)


def test_a_request_that_is_preempted_waits_for_its_rows_again(stack: Stack) -> None:
    keys = keys_of(range(2))
    context = observe(stack, keys)
    output: Any = stack.manager.prepare_store(keys, context)
    stack.write(output.store_spec)
    stack.manager.complete_store(set(keys), context)
    assert stack.cpu.stats()["awaited_requests"] == 0
    stack.manager.on_schedule_end(ScheduleEndContext((), (context.req_id,)))
    assert stack.cpu.stats()["awaited_bytes"] == 2 * ROWS[0]
    stack.store(keys_of(range(10, 16)))
    assert stack.cpu.lookup(keys) == [True, True]
    # It runs again, and asked for nothing: all was still on the GPU.
    stack.manager.resumed([context.req_id, "of nobody"])
    assert stack.cpu.stats()["awaited_bytes"] == 0
    stack.manager.on_request_finished(context)
    assert stack.cpu.stats()["awaited_requests"] == 0


def test_a_request_that_resumes_without_a_load_keeps_nothing_any_more(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    made = engine.made
    name = engine.add(list(range(3, 3 + 6 * BLOCK)), max_tokens=BLOCK + 4)
    for _ in range(3):
        made.step()
    (request,) = made.scheduler.running
    made.scheduler.running.remove(request)
    made.scheduler._preempt_request(request, time.monotonic())
    while request.status is not RequestStatus.RUNNING:
        made.step()
    for _ in range(2):
        made.step()
    assert request.status is RequestStatus.RUNNING, name
    assert engine.cpu("awaited_requests") == 0
    engine.settle()


def test_a_request_without_a_manager_that_serves_is_not_told_of() -> None:
    closed = Stack(slots=4)
    observe(closed, keys_of(range(2)))
    assert closed.manager.faults.total == 0


@pytest.mark.parametrize(
    ("actions", "hint"),
    [
        ([], None),
        ([("kvstrata.follows", {"follows": "tool_use"})], "tool_use"),
        ([("other", {}), ("kvstrata.follows", {"follows": "end_of_turn"})], "end_of_turn"),
        ([("kvstrata.follows", {"follows": "soon"})], None),
        ([("kvstrata.follows", {})], None),
        ([("kvstrata.follows", {"follows": ["tool_use"]})], None),
        ([("kvstrata.follows", "tool_use")], None),
    ],
)
def test_what_follows_is_read_from_the_hints_of_a_request(
    actions: list[tuple[str, dict[str, Any]]], hint: str | None
) -> None:
    named = [SimpleNamespace(action_type=name, payload=payload) for name, payload in actions]
    status = SimpleNamespace(
        update_offload_keys=lambda: None,
        group_states=(),
        req_context=SimpleNamespace(kv_hints=SimpleNamespace(actions=named)),
    )
    arrival = arrivals.of(SimpleNamespace(num_prompt_tokens=7), status)
    assert (arrival.prompt_tokens, arrival.hint) == (7, hint)
