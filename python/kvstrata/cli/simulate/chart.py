"""Curves of hit ratio by size as a picture of few shapes, whatever it is written as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#3d8b5f", "#7d5ba6", "#b8860b", "#444444")
_INK, _GRID = "#000000", "#dddddd"

# Name of a curve, and its points: blocks, hit ratio.
Curve = tuple[str, "Sequence[tuple[int, float]]"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Straight pieces from point to point."""

    points: tuple[Point, ...]
    colour: str
    width: int


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    at: Point
    radius: int
    colour: str


@dataclass(frozen=True)
class Text:
    """One line; `at` is on its base line."""

    at: Point
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: int = 12
    colour: str = _INK


Shape = Line | Dot | Text


@dataclass(frozen=True)
class _Scale:
    low: int
    high: int
    top: float

    def x(self, blocks: int) -> float:
        span = math.log(self.high / self.low) if self.high > self.low else 1.0
        return _LEFT + math.log(blocks / self.low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, ratio: float) -> float:
        return HEIGHT - _BOTTOM - ratio / self.top * (HEIGHT - _TOP - _BOTTOM)


def shapes(title: str, curves: Sequence[Curve]) -> list[Shape]:
    """The picture, from the back to the front. Sizes are on a logarithmic axis."""
    points = [point for _, own in curves for point in own]
    sizes = sorted({blocks for blocks, _ in points})
    top = max(0.1, math.ceil(max(ratio for _, ratio in points) * 10) / 10)
    scale = _Scale(sizes[0], sizes[-1], top)
    drawn: list[Shape] = [Text((_LEFT, 22), title, size=14)]
    for step in range(round(top * 10) + 1):
        at = scale.y(step / 10)
        drawn += [
            Line(((_LEFT, at), (WIDTH - _RIGHT, at)), _GRID, 1),
            Text((_LEFT - 8, at + 4), f"{step / 10:.1f}", "end"),
        ]
    drawn += [
        Text((scale.x(blocks), HEIGHT - _BOTTOM + 18), f"{blocks:,}", "middle") for blocks in sizes
    ]
    drawn.append(Text(((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10), "blocks", "middle"))
    for number, (name, own) in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        places = tuple((scale.x(blocks), scale.y(ratio)) for blocks, ratio in sorted(own))
        drawn += [
            Line(places, colour, 2),
            *(Dot(place, 3, colour) for place in places),
            Text((WIDTH - _RIGHT + 14, _TOP + 18 * number), name, colour=colour),
        ]
    return drawn
