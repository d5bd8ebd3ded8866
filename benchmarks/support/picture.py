"""Panels of curves as a PNG, drawn by Pillow, which TensorBoard brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
PALE = ("#c7d5e5", "#fad1d6", "#bddbc3", "#efe8c0")
WIDTH, HEIGHT, MARGIN = 620, 420, 60


@dataclass(frozen=True)
class Curve:
    """Values at equal distances.

    Attributes:
        broad: Draw it as a pale band, in the colour of the thin line that comes next.
        last: Step of the last value; by default the number of values.
    """

    name: str
    values: tuple[float, ...]
    broad: bool = False
    last: int = 0

    def place(self, number: int) -> float:
        """Return the step of a value, counted from 1."""
        return number * (self.last or len(self.values)) / len(self.values)


def draw_panels(panels: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw panels side by side, each with separate axes, under its title."""
    image = Image.new("RGB", (WIDTH * len(panels), HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    for number, (title, curves) in enumerate(panels.items()):
        _panel(draw, font, WIDTH * number, title, curves)
    image.save(path)


def _panel(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont, left: int, title: str, curves: Sequence[Curve]
) -> None:
    low = min(min(curve.values) for curve in curves)
    high = max(max(curve.values) for curve in curves)
    steps = round(max(curve.place(len(curve.values)) for curve in curves))
    right, top, bottom = left + WIDTH - 20, 40, HEIGHT - MARGIN

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + MARGIN + (right - left - MARGIN) * (step - 1) / max(1, steps - 1)
        return x, bottom - (bottom - top) * (value - low) / ((high - low) or 1.0)

    draw.text((left + MARGIN, 12), title, fill="black", font=font)
    for mark in range(5):
        value = low + (high - low) * mark / 4
        y = place(1, value)[1]
        draw.line((left + MARGIN, y, right, y), fill="#dddddd")
        draw.text((left + 10, y - 8), f"{value:.2f}", fill="black", font=font)
        step = round(1 + (steps - 1) * mark / 4)
        draw.text((place(step, low)[0] - 8, bottom + 6), str(step), fill="black", font=font)
    for number, curve in enumerate(curves):
        shade = number // 2 if any(other.broad for other in curves) else number
        color = (PALE if curve.broad else COLORS)[shade % len(COLORS)]
        points = [place(curve.place(number), value) for number, value in enumerate(curve.values, 1)]
        draw.line(points, fill=color, width=9 if curve.broad else 2, joint="curve")
        y = top + 8 + 20 * number
        draw.line((right - 230, y + 8, right - 200, y + 8), fill=color, width=9 if curve.broad else 2)
        draw.text((right - 192, y), curve.name, fill="black", font=font)
