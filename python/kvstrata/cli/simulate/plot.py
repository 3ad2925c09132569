"""Pictures in files: SVG, which needs no library, and PNG, which Pillow writes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from kvstrata.cli.simulate.chart import HEIGHT, WIDTH, Dot, Line, shapes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstrata.cli.simulate.chart import Curve, Shape

FORMS = (".svg", ".png")
# A PNG is drawn so many times as large and made smaller, so that its lines are smooth.
_FINER = 3
_PNG_SCALE = 2
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def check(path: Path) -> None:
    """Raise ``ValueError`` where a picture of this name cannot be written."""
    if path.suffix.lower() not in FORMS:
        raise ValueError(f"{path}: a picture's name ends with {' or '.join(FORMS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    if path.suffix.lower() == ".png":
        _pillow()


def write(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Draw curves into a file of the form that its name says."""
    drawn = shapes(title, curves)
    if path.suffix.lower() == ".png":
        _png(drawn).save(path, format="PNG")
    else:
        path.write_text(svg(drawn), encoding="utf-8")


def svg(drawn: Sequence[Shape]) -> str:
    """The shapes as an SVG picture."""
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    ground = f'<rect {size} fill="white"/>'
    return "\n".join([head, ground, *map(_element, drawn), "</svg>", ""])


def _element(shape: Shape) -> str:
    if isinstance(shape, Line):
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in shape.points)
        style = f'fill="none" stroke="{shape.colour}" stroke-width="{shape.width}"'
        return f'<path d="{path}" {style}/>'
    x, y = shape.at
    if isinstance(shape, Dot):
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{shape.radius}"'
        return f'<circle {place} fill="{shape.colour}"/>'
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{shape.anchor}"'
    style = f'font-size="{shape.size}" fill="{shape.colour}"'
    return f"<text {place} {style}>{escape(shape.text)}</text>"


def _pillow() -> Any:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        msg = "a PNG is drawn with Pillow, which is not there: pip install pillow"
        raise ValueError(msg) from error
    return Image, ImageDraw, ImageFont


def _png(drawn: Sequence[Shape]) -> Any:
    image_of, draw_of, font_of = _pillow()
    scale = _PNG_SCALE * _FINER
    image = image_of.new("RGB", (WIDTH * scale, HEIGHT * scale), "white")
    draw = draw_of.Draw(image)
    for shape in drawn:
        if isinstance(shape, Line):
            points = [(x * scale, y * scale) for x, y in shape.points]
            draw.line(points, fill=shape.colour, width=shape.width * scale, joint="curve")
            continue
        x, y = (part * scale for part in shape.at)
        if isinstance(shape, Dot):
            radius = shape.radius * scale
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.colour)
        else:
            font = font_of.load_default(shape.size * scale)
            draw.text((x, y), shape.text, shape.colour, font, anchor=_ANCHORS[shape.anchor])
    small = (WIDTH * _PNG_SCALE, HEIGHT * _PNG_SCALE)
    return image.resize(small, image_of.Resampling.LANCZOS)
