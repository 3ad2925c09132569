from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.cli.demo import report

if TYPE_CHECKING:
    from collections.abc import Callable

FLIP = {"file": "/kv/m/g0.rows", "offset": 12288, "group": 0}


def judge(answers: Any) -> dict[str, Any]:
    cold, warm = answers.results()
    return report.judge_model("llama", answers.prompts, cold, warm, FLIP)


def test_a_demo_in_which_everything_holds_has_no_failures(answers: Any) -> None:
    model = judge(answers)
    assert model["failures"] == []
    assert model["reloaded_tokens"] == 16 * 128 + 12 * 128
    assert model["prompt_tokens"] == model["reloaded_tokens"] + 2 * 7
    assert model["tokens_identical"] is True
    assert model["logprob_difference_prefix_cache"] == 0.0
    assert model["teeth"]["flipped_byte"]["recomputed_tokens"] == 128
    assert model["teeth"]["flipped_byte"]["offset"] == 12288
    json.dumps(model)


def change(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda steps: steps[name].update(values)


NOT_SEEN = {"token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change("warm:prompt-0", token_ids=[5, 7]), "tokens differ"),
        (change("prefix:prompt-1", token_ids=[5, 7]), "tokens differ"),
        (change("cold:prompt-0", cached_tokens=128), "cold run found 128"),
        (change("warm:prompt-0", external_tokens=0, cached_tokens=0), "not comparable"),
        (change("prefix:prompt-0", local_tokens=1920, cached_tokens=1920), "not comparable"),
        (change("warm:prompt-0", external_tokens=1024, local_tokens=1024), "not comparable"),
        (change("warm:prompt-0", logprobs=[[-1.0, -2.0], [-3.0, -0.5000001]]), "from the cache"),
        (change("cold:prompt-0", logprobs=[[-1.0, -2.0], [-3.0, -0.51]]), "from the cold run"),
        (change("warm:replaced", **NOT_SEEN), "the output did not tell"),
        (change("warm:replaced", replaced=None), "the output did not tell"),
        (change("warm:replaced", external_tokens=0), "the output did not tell"),
        (change("warm:flipped", failed_loads=0), "not answered by recompute"),
        (change("warm:flipped", cached_tokens=512), "not answered by recompute"),
        (change("warm:flipped", token_ids=[5, 7]), "not answered by recompute"),
        (
            change("warm:flipped", logprobs=[[-1.0, -2.0], [-3.0, -0.6]]),
            "not answered by recompute",
        ),
    ],
)
def test_each_thing_that_does_not_hold_is_a_failure(
    answers: Any, edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit(answers.steps)
    assert any(words in failure for failure in judge(answers)["failures"])


def test_less_than_ninety_percent_reloaded_is_a_failure(answers: Any) -> None:
    for kind, counter in (("warm", "external_tokens"), ("prefix", "local_tokens")):
        answers.steps[f"{kind}:prompt-0"].update({counter: 1024, "cached_tokens": 1024})
    failures = judge(answers)["failures"]
    assert failures == ["only 71% of the prompt tokens were reloaded"]


def test_stores_that_are_not_finished_are_a_failure(answers: Any) -> None:
    answers.settled = False
    assert any("did not finish" in failure for failure in judge(answers)["failures"])


def test_runs_with_different_cached_counts_have_no_difference_at_all(answers: Any) -> None:
    answers.steps["prefix:prompt-0"].update(local_tokens=1920, cached_tokens=1920)
    model = judge(answers)
    assert model["logprob_difference_prefix_cache"] is None
    assert "n/a" in report.format_model(model)


def test_the_difference_ends_where_two_answers_part() -> None:
    one = {"token_ids": [1, 2, 3], "logprobs": [[0.0], [0.5], [9.0]]}
    other = {"token_ids": [1, 7, 3], "logprobs": [[0.0], [0.25], [0.0]]}
    assert report.logprob_difference(one, other) == 0.25


def test_the_table_names_every_prompt_and_the_verdict(answers: Any) -> None:
    model = judge(answers)
    text = report.format_report({"models": [model], "failures": [], "passed": True})
    assert "prompt-0" in text
    assert "2048 (99.7%)" in text
    assert "stored 3.0 MiB, loaded 1.0 MiB" in text
    assert "1 load(s) refused, 128 tokens recomputed, output identical" in text
    assert text.endswith("passed")


def test_the_table_of_a_failed_demo_says_what_failed(answers: Any) -> None:
    answers.steps["warm:replaced"].update(NOT_SEEN)
    model = judge(answers)
    text = report.format_report({"models": [model], "failures": ["llama: x"], "passed": False})
    assert "DID NOT CHANGE" in text
    assert text.endswith("failed: llama: x")
