"""What eviction policies are told of a request: all its keys when it arrives, and how it ended.

A connector sees a request's block hashes when vLLM takes the request up, long before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

    from kvstrata.vllm.below import TierBelow

# An action of vLLM's KV hints that says what follows a request, and what it can say.
HINT_ACTION = "kvstrata.follows"
HINTS = frozenset({"tool_use", "end_of_turn"})


@dataclass(frozen=True)
class Arrival:
    """A request as it arrives."""

    # All its keys by group, each in the order of the prompt.
    groups: tuple[Sequence[OffloadKey], ...]
    prompt_tokens: int
    # What follows: one of HINTS, if somebody said so.
    hint: str | None = None

    @property
    def known(self) -> dict[str, Any]:
        """What tiers are told beside the keys."""
        return {"prompt_tokens": self.prompt_tokens, "new_tokens": None, "hint": self.hint}


@dataclass
class Observed:
    """What the context of such a request has among its state."""

    # The name under which tiers below know it; no other request ever has the same.
    name: str
    output_tokens: int | None = None


def of(request: Any, status: Any) -> Arrival:
    """A request of vLLM's; `status` is what its offloading scheduler keeps of it."""
    status.update_offload_keys()
    return Arrival(
        groups=tuple(group.offload_keys for group in status.group_states),
        prompt_tokens=int(request.num_prompt_tokens),
        hint=_hint(getattr(status.req_context, "kv_hints", None)),
    )


def _hint(envelope: Any) -> str | None:
    for action in getattr(envelope, "actions", None) or ():
        if action.action_type == HINT_ACTION:
            # It is what a client sent.
            said = action.payload.get("follows") if isinstance(action.payload, dict) else None
            if isinstance(said, str) and said in HINTS:
                return said
    return None


class Arrivals:
    """Tells tiers below of requests."""

    def __init__(self) -> None:
        self._count = 0

    def tell(
        self, req_context: ReqContext, arrival: Arrival, tiers: Sequence[TierBelow]
    ) -> list[tuple[TierBelow, list[bytes]]]:
        """Tell those that the request may load from; keys that each is to be offered again."""
        self._count += 1
        name = f"{self._count}"
        req_context.set_state(Observed(name))
        allows = req_context.load_tier_filter.allows
        told = [tier for tier in tiers if allows(tier.medium, tier.locality)]
        keys = [key for group in arrival.groups for key in group] if told else []
        for tier in told:
            tier.observe(name, keys, arrival.known)
        return [(tier, tier.offered_again(keys)) for tier in told]

    def end(self, req_context: ReqContext, tiers: Sequence[TierBelow]) -> None:
        """Tell them that it has ended."""
        observed = req_context.get_state(Observed)
        if observed is not None:
            for tier in tiers:
                tier.finish(observed.name, observed.output_tokens)


def output_tokens(req_context: ReqContext) -> int | None:
    """Tokens of the request's answer, where they are known."""
    observed = req_context.get_state(Observed)
    return None if observed is None else observed.output_tokens


def answered(req_context: ReqContext, output_tokens: int) -> None:
    """Note how long the answer was, for when the request ends."""
    observed = req_context.get_state(Observed)
    if observed is not None:
        observed.output_tokens = output_tokens
