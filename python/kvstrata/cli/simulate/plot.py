"""Curves of hit ratio by size, as an SVG picture: no library is needed to draw a few lines."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#3d8b5f", "#7d5ba6", "#b8860b", "#444444")

# Name of a curve, and its points: blocks, hit ratio.
Curve = tuple[str, "Sequence[tuple[int, float]]"]


def svg(title: str, curves: Sequence[Curve]) -> str:
    """One picture. Sizes are on a logarithmic axis."""
    points = [point for _, own in curves for point in own]
    low = min(blocks for blocks, _ in points)
    high = max(blocks for blocks, _ in points)
    top = max(0.1, math.ceil(max(ratio for _, ratio in points) * 10) / 10)

    def x(blocks: int) -> float:
        span = math.log(high / low) if high > low else 1.0
        return _LEFT + math.log(blocks / low) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        return _HEIGHT - _BOTTOM - ratio / top * (_HEIGHT - _TOP - _BOTTOM)

    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for step in range(round(top * 10) + 1):
        at = y(step / 10)
        lines += [
            f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>',
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{step / 10:.1f}</text>',
        ]
    for blocks in sorted({blocks for blocks, _ in points}):
        place = f'x="{x(blocks):.1f}" y="{_HEIGHT - _BOTTOM + 18}"'
        lines.append(f'<text {place} text-anchor="middle">{blocks:,}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">blocks</text>')
    for number, (name, own) in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [f"{x(blocks):.1f} {y(ratio):.1f}" for blocks, ratio in sorted(own)]
        path = "M" + "L".join(places)
        row = _TOP + 18 * number
        lines += [
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(
                f'<circle cx="{p.split()[0]}" cy="{p.split()[1]}" r="3" fill="{colour}"/>'
                for p in places
            ),
            f'<text x="{_WIDTH - _RIGHT + 14}" y="{row}" fill="{colour}">{escape(name)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
