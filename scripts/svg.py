"""A drawing as SVG text: rectangles, labels, and the two kinds of charts that the pages of docs/ show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#4c78a8", "#e0803c", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#d4605a", "#9c755f")
GREY = "#bbbbbb"
CHARACTER = 6.2  # width of a character at the size of labels


class Drawing:
    """An SVG picture on white.

    Args:
        width: Width in pixels.
        height: Height in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, color: str, text: str = "", title: str = "") -> None:
        """Draw a rectangle, with a text inside if it is wide enough, and a title that a pointer shows."""
        tip = f"<title>{escape(title or text)}</title>" if title or text else ""
        self._parts.append(
            f'<g>{tip}<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{color}" '
            f'stroke="white" stroke-width="0.5"/></g>'
        )
        if text and len(text) * CHARACTER <= width:
            self.text(x + width / 2, y + height / 2 + 4, text, anchor="middle", color="white", size=11)

    def text(self, x: float, y: float, text: str, anchor: str = "start", color: str = "#222", size: int = 12) -> None:
        """Write a line of text."""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw the outline of a rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} fill="none" stroke="#888" rx="4"/>')

    def inside(self, svg: str, y: float) -> None:
        """Place another picture at this height."""
        self._parts.append(svg.replace("<svg ", f'<svg y="{y:.0f}" ', 1).rstrip())

    def legend(self, y: float, names: Mapping[str, str], x: float = 10) -> None:
        """Explain colors on one line: name -> color."""
        for name, color in names.items():
            self.box(x, y - 10, 12, 12, color)
            self.text(x + 17, y, name)
            x += 34 + len(name) * CHARACTER

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *self._parts, "</svg>"]) + "\n"


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float], str]], unit: str, limit: float = 0.0) -> str:
    """Return bars that are stacked from parts.

    Args:
        rows: For each bar its label, its parts (name -> value; the same names in all bars), and a note after it.
        unit: Unit of the values.
        limit: A value to mark with a line; 0 for none.
    """
    left, scale_to, step = 150, 460, 34
    most = max([limit, *(sum(parts.values()) for _, parts, _ in rows)])
    drawing = Drawing(900, 60 + step * len(rows))
    names = list(rows[0][1])
    drawing.legend(20, {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)})
    for place, (label, parts, note) in enumerate(rows):
        y, x = 36 + step * place, float(left)
        drawing.text(left - 8, y + 17, label, anchor="end")
        for number, name in enumerate(names):
            size, color = parts[name], COLORS[number % len(COLORS)]
            width = size / most * scale_to
            drawing.box(x, y, width, step - 8, color, f"{size:.1f}", f"{name} {size:.2f}")
            x += width
        drawing.text(max(x, left + limit / most * scale_to) + 8, y + 17, f"{sum(parts.values()):.1f} {unit}{note}")
    if limit:
        x = left + limit / most * scale_to
        drawing.box(x, 30, 1.5, step * len(rows) + 6, "#222")
        drawing.text(x, step * len(rows) + 52, f"{limit:g} {unit}", anchor="middle", size=11)
    return drawing.svg()


Bars = Sequence[tuple[str, float, float]]
"""Label, start and end of what a lane does."""


def lanes(panels: Sequence[tuple[str, Mapping[str, Bars]]], colors: Mapping[str, str]) -> str:
    """Return timelines below each other, on one scale of time.

    Args:
        panels: For each timeline its title, and lane -> (label, start, end) in seconds.
        colors: Lane -> color.
    """
    left, wide, row = 110, 860, 24
    last = max(end for _, rows in panels for bars in rows.values() for _, _, end in bars)
    heights = [34 + row * len(rows) for _, rows in panels]
    drawing = Drawing(left + wide + 20, sum(heights) + 26)
    top = 0
    for (title, rows), height in zip(panels, heights, strict=True):
        drawing.text(10, top + 20, title)
        for place, (lane, bars) in enumerate(rows.items()):
            y = top + 28 + row * place
            drawing.text(left - 8, y + 15, lane, anchor="end", size=11)
            for label, start, end in bars:
                x, width = left + start / last * wide, (end - start) / last * wide
                drawing.box(x, y, width, row - 4, colors[lane], label, f"{label}: {1e3 * (end - start):.3f} ms")
        top += height
    tick = round_step(1e3 * last)
    for mark in range(int(1e3 * last / tick) + 1):
        x = left + wide * mark * tick / (1e3 * last)
        drawing.text(x, top + 18, f"{mark * tick:g} ms", anchor="middle", size=11)
    return drawing.svg()


def round_step(length: float) -> float:
    """Return a distance of 1, 2 or 5 times a power of ten that divides a length into four to ten parts."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(step * power for step in (0.1, 0.2, 0.5, 1.0) if length / (step * power) < 10)
