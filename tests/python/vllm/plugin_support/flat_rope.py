"""Positions of an LFM2 on vLLM's CPU build, as its kernel for them wants its arguments.

The kernel finds a token's heads by the last stride but one. LFM2 hands it `[tokens, heads, head]`,
where that is the stride of a head: tokens are turned several times, by threads that overtake each
other, and what comes out depends on how many tokens a step has (seen on 0.32, with no connector).
Other models hand it `[tokens, heads * head]`. So an LFM2's answers can only be compared with these
arguments flattened.
"""

from __future__ import annotations

from typing import Any


def flatten_rope() -> None:
    """From now on LFM2 models of this process get a rotary embedding that is given flat tensors."""
    from vllm.model_executor.models import lfm2

    inner = lfm2.get_rope

    def get_rope(*arguments: Any, **named: Any) -> Any:
        rope = inner(*arguments, **named)

        def flat(positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
            turned = rope(positions, query.flatten(1), key.flatten(1))
            return turned[0].view(query.shape), turned[1].view(key.shape)

        return flat

    lfm2.get_rope = get_rope
