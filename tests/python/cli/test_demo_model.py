from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from kvstrata.cli.demo import model, plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shape", model.SHAPES)
def test_a_model_is_the_same_bytes_on_every_run(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.numpy")
    digests = set()
    for run in ("one", "two"):
        path = model.make_model(shape, tmp_path / run).path
        digests.add(hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest())
        config = json.loads((path / "config.json").read_text())
        assert config["vocab_size"] == model.VOCAB_SIZE
        assert config["max_position_embeddings"] >= plan.MAX_MODEL_LEN
    assert len(digests) == 1


def test_the_gemma_shape_has_a_window_that_the_prompts_exceed() -> None:
    config = model._CONFIGS["gemma3"]
    assert set(config["layer_types"]) == {"sliding_attention", "full_attention"}
    shortest = min(len(prompt.token_ids) for prompt in plan.make_prompts(4).all())
    assert shortest > config["sliding_window"]


def test_no_two_prompts_share_their_first_block_and_all_leave_a_tail() -> None:
    prompts = plan.make_prompts(8).all()
    assert len({prompt.token_ids[: plan.BLOCK_TOKENS] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert len(prompt.token_ids) - prompt.full_tokens == plan.TAIL_TOKENS
        assert len(prompt.token_ids) + plan.MAX_TOKENS <= plan.MAX_MODEL_LEN
        assert prompt.full_tokens / len(prompt.token_ids) > 0.9


def test_the_warm_engine_asks_each_prompt_first_of_the_disk_then_of_its_own_cache() -> None:
    prompts = plan.make_prompts(2)
    steps = plan.warm_steps(prompts)
    assert [step.name for step in steps] == [
        "warm:prompt-0",
        "prefix:prompt-0",
        "warm:prompt-1",
        "prefix:prompt-1",
        "warm:flipped",
        "warm:replaced",
    ]
    assert [step.name for step in steps if step.arm] == ["warm:replaced"]


def test_only_the_warm_engine_has_the_tier_that_replaces_a_row(tmp_path: Path) -> None:
    plain = plan.kv_transfer_config(root=tmp_path, engine_id="e", trigger=None)
    (tier,) = plain["kv_connector_extra_config"]["secondary_tiers"]
    assert tier == {"type": "kvstrata_disk", "url": tmp_path.as_uri(), "capacity": "1GiB"}
    armed = plan.kv_transfer_config(root=tmp_path, engine_id="e", trigger=tmp_path / "t")
    (tier,) = armed["kv_connector_extra_config"]["secondary_tiers"]
    assert tier["trigger"] == str(tmp_path / "t")
    assert tier["capacity"] == "1GiB"
