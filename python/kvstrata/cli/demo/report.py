"""Judges what two engine processes answered for one model, and prints it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.cli.demo.plan import Prompt, Prompts

RELOADED_SHARE_MIN = 0.9
# float32 rounding of another batch shape is some 1e-5 here; a wrong byte moves whole units.
ROUNDING_MAX = 1e-3

Step = dict[str, Any]


def logprob_difference(one: Step, other: Step) -> float:
    """Largest difference of any token's log probability, as long as both chose the same tokens.

    The position at which they first part is still compared: both saw the same tokens up to there.
    """
    largest = 0.0
    pairs = zip(
        one["logprobs"], other["logprobs"], one["token_ids"], other["token_ids"], strict=True
    )
    for left, right, left_token, right_token in pairs:
        position = max(abs(a - b) for a, b in zip(left, right, strict=True))
        largest = max(largest, position)
        if left_token != right_token:
            break
    return largest


def judge_model(
    shape: str,
    prompts: Prompts,
    cold: dict[str, Any],
    warm: dict[str, Any],
    flip: dict[str, Any],
    *,
    source: str = "disk",
) -> dict[str, Any]:
    """The report of one model. `failures` in it is empty when everything held.

    `source` is where the warm engine's rows come from, in words.
    """
    steps: dict[str, Step] = {
        step["name"]: step for result in (cold, warm) for step in result["steps"]
    }
    failures: list[str] = []
    if not cold["settled"]:
        failures.append("the cold engine did not finish its stores in time")
    rows = [_judge_prompt(prompt, steps, failures, source) for prompt in prompts.measured]
    prompt_tokens = sum(row["prompt_tokens"] for row in rows)
    reloaded = sum(row["reloaded_tokens"] for row in rows)
    share = reloaded / prompt_tokens
    if share < RELOADED_SHARE_MIN:
        failures.append(f"only {share:.0%} of the prompt tokens were reloaded")
    differences = [row["logprob_difference_prefix_cache"] for row in rows]
    comparable = None not in differences
    return {
        "model": shape,
        "source": source,
        "prompts": rows,
        "prompt_tokens": prompt_tokens,
        "reloaded_tokens": reloaded,
        "reloaded_share": share,
        "bytes_stored": cold["bytes_stored"],
        "bytes_loaded": warm["bytes_loaded"],
        "cold_first_token_s": statistics.median(row["cold_first_token_s"] for row in rows),
        "warm_first_token_s": statistics.median(row["warm_first_token_s"] for row in rows),
        "tokens_identical": all(row["tokens_identical"] for row in rows),
        "same_cached_tokens": all(row["same_cached_tokens"] for row in rows),
        "logprob_difference_prefix_cache": max(differences) if comparable else None,
        "logprob_difference_cold": max(row["logprob_difference_cold"] for row in rows),
        "teeth": {
            "replaced_row": _judge_replaced(prompts.replaced, steps, failures),
            "flipped_byte": _judge_flipped(prompts.flipped, steps, flip, failures),
        },
        "failures": failures,
    }


def _judge_prompt(
    prompt: Prompt, steps: dict[str, Step], failures: list[str], source: str
) -> dict[str, Any]:
    cold, warm, prefix = (steps[f"{kind}:{prompt.name}"] for kind in ("cold", "warm", "prefix"))
    identical = cold["token_ids"] == warm["token_ids"] == prefix["token_ids"]
    # Only runs that computed the same tail are comparable bit by bit, so this comes first.
    same_cached = (
        warm["external_tokens"] == warm["cached_tokens"]
        and prefix["local_tokens"] == prefix["cached_tokens"]
        and warm["cached_tokens"] == prefix["cached_tokens"]
    )
    to_prefix = logprob_difference(warm, prefix) if same_cached else None
    to_cold = logprob_difference(warm, cold)
    if cold["cached_tokens"] != 0:
        failures.append(f"{prompt.name}: the cold run found {cold['cached_tokens']} tokens cached")
    if not identical:
        failures.append(f"{prompt.name}: the tokens differ")
    if to_prefix is None:
        failures.append(
            f"{prompt.name}: {warm['external_tokens']} tokens came from {source}, "
            f"{prefix['local_tokens']} from the prefix cache: not comparable"
        )
    elif to_prefix != 0.0:
        failures.append(f"{prompt.name}: log probabilities differ by {to_prefix:g} from the cache")
    if to_cold > ROUNDING_MAX:
        failures.append(f"{prompt.name}: log probabilities differ by {to_cold:g} from the cold run")
    return {
        "name": prompt.name,
        "prompt_tokens": len(prompt.token_ids),
        "reloaded_tokens": warm["external_tokens"],
        "prefix_cache_tokens": prefix["local_tokens"],
        "cold_first_token_s": cold["first_token_s"],
        "warm_first_token_s": warm["first_token_s"],
        "tokens_identical": identical,
        "same_cached_tokens": same_cached,
        "logprob_difference_prefix_cache": to_prefix,
        "logprob_difference_cold": to_cold,
    }


def _judge_replaced(prompt: Prompt, steps: dict[str, Step], failures: list[str]) -> dict[str, Any]:
    """A row replaced after its checksum was verified has to show in the output."""
    cold, warm = (steps[f"{kind}:{prompt.name}"] for kind in ("cold", "warm"))
    changed = cold["token_ids"] != warm["token_ids"]
    reloaded = warm["external_tokens"]
    caught = warm["replaced"] is not None and reloaded == prompt.full_tokens and changed
    if not caught:
        failures.append("a loaded row was to be replaced by another's, and the output did not tell")
    return {
        "passed": caught,
        "row": warm["replaced"],
        "reloaded_tokens": reloaded,
        "tokens_changed": changed,
        "logprob_difference_cold": logprob_difference(warm, cold),
    }


def _judge_flipped(
    prompt: Prompt, steps: dict[str, Step], flip: dict[str, Any], failures: list[str]
) -> dict[str, Any]:
    """A row whose stored byte was flipped has to be refused and recomputed, to the same answer."""
    cold, warm = (steps[f"{kind}:{prompt.name}"] for kind in ("cold", "warm"))
    identical = cold["token_ids"] == warm["token_ids"]
    difference = logprob_difference(warm, cold)
    recomputed = prompt.full_tokens - warm["cached_tokens"]
    refused = warm["failed_loads"] > 0
    passed = refused and recomputed > 0 and identical and difference <= ROUNDING_MAX
    if not passed:
        failures.append("a row with a flipped byte was not answered by recompute")
    return {
        "passed": passed,
        **flip,
        "loads_refused": warm["failed_loads"],
        "reloaded_tokens": warm["external_tokens"],
        "recomputed_tokens": recomputed,
        "tokens_identical": identical,
        "logprob_difference_cold": difference,
    }


def format_model(model: dict[str, Any]) -> str:
    """The table of one model."""
    columns = ("prompt", "tokens", "reloaded", "cold", "warm", "identical", "vs cache", "vs cold")
    rows = [_cells(row["name"], row) for row in model["prompts"]]
    rows.append(_cells("all", model))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [f"{model['model']}"]
    for cells in (columns, *rows):
        name, *rest = zip(cells, widths, strict=True)
        lines.append(
            "  " + "  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in rest)])
        )
    teeth = model["teeth"]
    replaced, flipped = teeth["replaced_row"], teeth["flipped_byte"]
    verdict = "changed, as it must" if replaced["passed"] else "DID NOT CHANGE"
    answer = "identical" if flipped["tokens_identical"] else "DIFFERENT"
    refused = f"{flipped['loads_refused']} load(s) refused"
    recomputed = f"{flipped['recomputed_tokens']} tokens recomputed"
    lines += [
        f"  stored {_mebibytes(model['bytes_stored'])}, loaded {_mebibytes(model['bytes_loaded'])}",
        f"  a loaded row replaced behind the checksum: output {verdict}",
        f"  a byte of a row in {model['source']} flipped: {refused}, {recomputed}, output {answer}",
    ]
    lines += [f"  FAILED: {failure}" for failure in model["failures"]]
    return "\n".join(lines)


def format_report(report: dict[str, Any]) -> str:
    """All tables, what the columns mean, and the verdict."""
    parts = [format_model(model) for model in report["models"]]
    parts.append(
        "cold, warm: time to the first token without and with the tiers (for 'all' the median).\n"
        "vs cache: largest logprob difference to the same prompt answered from vLLM's own prefix\n"
        "cache at the same cached-token count; has to be 0. vs cold: to the cold run, where only\n"
        "the rounding of another batch shape may differ."
    )
    parts.append("passed" if report["passed"] else "failed: " + "; ".join(report["failures"]))
    return "\n\n".join(parts)


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    share = row["reloaded_tokens"] / row["prompt_tokens"]
    return [
        name,
        str(row["prompt_tokens"]),
        f"{row['reloaded_tokens']} ({share:.1%})",
        f"{row['cold_first_token_s'] * 1e3:.0f} ms",
        f"{row['warm_first_token_s'] * 1e3:.0f} ms",
        "yes" if row["tokens_identical"] else "NO",
        _difference(row["logprob_difference_prefix_cache"]),
        _difference(row["logprob_difference_cold"]),
    ]


def _difference(value: float | None) -> str:
    if value is None:
        return "n/a"
    return "0" if value == 0.0 else f"{value:.1e}"


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
