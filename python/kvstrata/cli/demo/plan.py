"""What one demo runs: the prompts, the engine's settings and the steps of each engine process."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from kvstrata.cli.demo.model import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstrata.cli.demo.bucket import Bucket

# Tokens per KV block. vLLM's CPU backend takes multiples of 32; its default is 128.
BLOCK_TOKENS = 128
# Tokens after the last full block. Both a load from disk and vLLM's own prefix cache end at the
# last full block, so the two compute the same tail and are comparable bit by bit.
TAIL_TOKENS = 7
# Blocks of the prompts of the set, by turns.
PROMPT_BLOCKS = (16, 12, 20, 8)
# Blocks of the two prompts that the teeth checks use. Short, so that one row weighs much.
TEETH_BLOCKS = 4
MAX_TOKENS = 16
MAX_MODEL_LEN = 4096
CPU_BYTES = 192 << 20
ENGINE_KV_BYTES = 384 << 20
DISK_CAPACITY = "1GiB"

_FIRST_TOKEN = 3  # the ids below are padding, begin and end


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt as token ids. `full_tokens` of them lie in full blocks."""

    name: str
    token_ids: tuple[int, ...]

    @property
    def full_tokens(self) -> int:
        """Prompt tokens in full blocks: what a cache can hold at most."""
        return len(self.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The set that is measured, and one prompt for each teeth check."""

    measured: tuple[Prompt, ...]
    flipped: Prompt
    replaced: Prompt

    def all(self) -> tuple[Prompt, ...]:
        """Every prompt, in the order in which the cold engine runs them."""
        return (*self.measured, self.flipped, self.replaced)


@dataclasses.dataclass(frozen=True)
class Step:
    """One request to the engine. `arm`: replace one loaded row while it is answered."""

    name: str
    prompt: str
    arm: bool = False


def make_prompts(count: int) -> Prompts:
    """The prompts of a demo: random token ids, no two with a common first block."""
    measured = tuple(
        _prompt(f"prompt-{index}", PROMPT_BLOCKS[index % len(PROMPT_BLOCKS)], seed=1000 + index)
        for index in range(count)
    )
    return Prompts(
        measured=measured,
        flipped=_prompt("flipped", TEETH_BLOCKS, seed=1),
        replaced=_prompt("replaced", TEETH_BLOCKS, seed=2),
    )


def _prompt(name: str, blocks: int, *, seed: int) -> Prompt:
    generator = random.Random(seed)  # noqa: S311 - reproducible, nothing secret
    length = blocks * BLOCK_TOKENS + TAIL_TOKENS
    return Prompt(name, tuple(generator.randrange(_FIRST_TOKEN, VOCAB_SIZE) for _ in range(length)))


def cold_steps(prompts: Prompts) -> list[Step]:
    """The first engine: every prompt once, nothing cached anywhere."""
    return [Step(f"cold:{prompt.name}", prompt.name) for prompt in prompts.all()]


def warm_steps(prompts: Prompts) -> list[Step]:
    """The second engine: each prompt from the tiers, then again from vLLM's own prefix cache.

    The prompt whose row was flipped on disk comes after the measured ones, the one whose loaded
    row is replaced comes last, so that nothing wrong is in the engine before anything is measured.
    """
    steps = []
    for prompt in prompts.measured:
        steps.append(Step(f"warm:{prompt.name}", prompt.name))
        steps.append(Step(f"prefix:{prompt.name}", prompt.name))
    steps.append(Step(f"warm:{prompts.flipped.name}", prompts.flipped.name))
    steps.append(Step(f"warm:{prompts.replaced.name}", prompts.replaced.name, arm=True))
    return steps


def kv_transfer_config(
    *, root: Path, engine_id: str, trigger: Path | None, bucket: Bucket | None = None
) -> dict[str, Any]:
    """The `--kv-transfer-config` of one engine: those of docs/VLLM.md.

    With `bucket` there is an object tier below the disk tier. With `trigger` the lowest tier is the
    demo's own subclass, which differs in one thing: while the file `trigger` exists, one verified
    row is replaced before it is used.
    """
    tiers: list[dict[str, Any]] = [
        {"type": "kvstrata_disk", "url": root.resolve().as_uri(), "capacity": DISK_CAPACITY}
    ]
    replacing = "RowReplacingDiskTier"
    if bucket is not None:
        tiers.append(
            {
                "type": "kvstrata_object",
                "url": bucket.url,
                "endpoint": bucket.endpoint,
                "addressing": "path",
                "allow_http": True,
            }
        )
        replacing = "RowReplacingObjectTier"
    if trigger is not None:
        tiers[-1] |= {
            "type": replacing,
            "module_path": "kvstrata.cli.demo.tier",
            "trigger": str(trigger),
        }
    return {
        "kv_connector": "KVStrataConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"cpu_bytes_to_use": CPU_BYTES, "secondary_tiers": tiers},
    }


def engine_arguments(*, model: Path, transfer: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for one engine.

    float32, so that what another batch shape rounds differently is far below any choice between
    two tokens: "tokens identical" then says something about the bytes, not about ties.
    """
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_logprobs": VOCAB_SIZE,
        "kv_cache_memory_bytes": ENGINE_KV_BYTES,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        "kv_transfer_config": transfer,
    }


def request(
    *,
    prompts: Prompts,
    steps: Sequence[Step],
    engine: dict[str, Any],
    trigger: Path | None,
    hash_prompt: Prompt,
) -> dict[str, Any]:
    """What an engine process is asked to do, as JSON."""
    return {
        "engine": engine,
        "prompts": {prompt.name: list(prompt.token_ids) for prompt in prompts.all()},
        "steps": [dataclasses.asdict(step) for step in steps],
        "max_tokens": MAX_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "block_tokens": BLOCK_TOKENS,
        "trigger": None if trigger is None else str(trigger),
        "hash_prompt": hash_prompt.name,
    }
