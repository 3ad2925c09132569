"""Answers of two engine processes, made up: what a demo in which everything holds looks like."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvstrata.cli.demo import plan


def step(name: str, prompt: plan.Prompt, cached: int, *, local: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "prompt": prompt.name,
        "prompt_tokens": len(prompt.token_ids),
        "token_ids": [5, 6],
        "logprobs": [[-1.0, -2.0], [-3.0, -0.5]],
        "cached_tokens": cached,
        "first_token_s": 0.25,
        "external_tokens": 0 if local else cached,
        "local_tokens": cached if local else 0,
        "failed_loads": 0,
        "replaced": None,
    }


class Answers:
    def __init__(self) -> None:
        self.prompts = plan.make_prompts(2)
        cold = [step(f"cold:{prompt.name}", prompt, 0) for prompt in self.prompts.all()]
        warm = []
        for prompt in self.prompts.measured:
            full = prompt.full_tokens
            warm.append(step(f"warm:{prompt.name}", prompt, full))
            warm.append(step(f"prefix:{prompt.name}", prompt, full, local=True))
        flipped = step("warm:flipped", self.prompts.flipped, 384) | {"failed_loads": 1}
        replaced = step("warm:replaced", self.prompts.replaced, 512)
        replaced |= {"token_ids": [5, 9], "replaced": {"key": "aa", "by": "bb"}}
        self.steps = {entry["name"]: entry for entry in [*cold, *warm, flipped, replaced]}
        self.cold_names = [entry["name"] for entry in cold]
        self.settled = True

    def results(self) -> tuple[dict[str, Any], dict[str, Any]]:
        steps = copy.deepcopy(self.steps)
        cold = [steps.pop(name) for name in self.cold_names]
        return (
            {"steps": cold, "settled": self.settled, "bytes_stored": 3 << 20, "bytes_loaded": 0},
            {
                "steps": [*steps.values()],
                "settled": True,
                "bytes_stored": 0,
                "bytes_loaded": 1 << 20,
            },
        )


@pytest.fixture
def answers() -> Answers:
    return Answers()
