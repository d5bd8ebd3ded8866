"""SVG charts as text, for self-contained HTML pages.

Tested in ``tests/tools/test_report.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 200, 62, 22, 10
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
Points = Sequence[tuple[float, float]]


def smooth(points: Points, keep: float = 0.9) -> list[tuple[float, float]]:
    """Return the exponential moving average of points, corrected for the bias towards zero at the start."""
    total = weight = 0.0
    means = []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        means.append((x, total / weight))
    return means


def lines(
    title: str,
    series: Mapping[str, Points],
    unit: str = "",
    marks: Mapping[str, float] | None = None,
    *,
    smoothed: bool = True,
) -> str:
    """Return a figure of curves over iterations; "" without points.

    Args:
        title: Caption of the figure.
        series: Name -> points of a curve.
        unit: Unit of the y axis.
        marks: Name -> value of a horizontal line.
        smoothed: Draw curves of more than 8 points faintly, with their moving average on top.
    """
    marks = marks or {}
    drawn = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points] + list(marks.values())
    scale = _Scale(min(xs), max(xs), min(ys), max(ys))
    parts = [_axes(scale, unit)]
    for number, (name, points) in enumerate(drawn.items()):
        color = COLORS[number % len(COLORS)]
        many = smoothed and len(points) > 8
        parts.append(_path(points, scale, color, 0.3 if many else 1.0))
        parts.append(_path(smooth(points), scale, color, 1.0) if many else "")
        parts.append(_label(number, name, color))
    for number, (name, value) in enumerate(marks.items()):
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#111" stroke-dasharray="5 4"/>')
        parts.append(_label(len(drawn) + number, f"- - {name}", "#111"))
    return _figure(title, "".join(parts), HEIGHT)


def heat(title: str, rows: Sequence[Sequence[float]], names: Sequence[str], columns: Sequence[str]) -> str:
    """Return a heat map of loads, darker for larger values; "" without values.

    Args:
        title: Caption of the figure.
        rows: For each name, one value per column; 1 is a balanced load.
        names: Labels of the rows.
        columns: Labels of the columns; only the first and the last are drawn.
    """
    if not rows or not rows[0]:
        return ""
    height = max(6.0, min(18.0, 300 / len(rows)))
    width = (WIDTH - LEFT) / len(rows[0])
    top = max(max(row) for row in rows) or 1.0
    cells = []
    for r, row in enumerate(rows):
        cells.append(f'<text x="{LEFT - 4}" y="{(r + 0.8) * height:.1f}" class="end">{escape(names[r])}</text>')
        for c, value in enumerate(row):
            shade = round(255 * (1 - min(1.0, value / top)))
            place = (
                f'x="{LEFT + c * width:.2f}" y="{r * height:.1f}" width="{width + 0.3:.2f}" height="{height - 1:.1f}"'
            )
            hint = f"<title>{value:.2f} of a balanced load</title>"
            cells.append(f'<rect {place} fill="rgb(255,{shade},{shade})">{hint}</rect>')
    bottom = len(rows) * height + 14
    cells.append(f'<text x="{LEFT}" y="{bottom:.0f}">{escape(columns[0])}</text>')
    cells.append(f'<text x="{WIDTH}" y="{bottom:.0f}" class="end">{escape(columns[-1])}</text>')
    return _figure(title, "".join(cells), bottom + 4)


def spans(title: str, rows: Mapping[str, Sequence[tuple[float, float, str]]]) -> str:
    """Return a figure of bars on a time axis, with a row per kind; "" without bars.

    Args:
        title: Caption of the figure.
        rows: Kind -> bars of (start, length, name), in seconds.
    """
    ends = [start + length for bars in rows.values() for start, length, _ in bars]
    if not ends:
        return ""
    begin = min(start for bars in rows.values() for start, _, _ in bars)
    scale = (WIDTH - 150) / ((max(ends) - begin) or 1.0)
    parts = []
    for r, (row, bars) in enumerate(rows.items()):
        y = r * 22
        parts.append(f'<text x="145" y="{y + 14}" class="end">{escape(row)}</text>')
        for start, length, name in bars:
            place = (
                f'x="{150 + (start - begin) * scale:.2f}" y="{y}" width="{max(0.4, length * scale):.2f}" height="18"'
            )
            hint = f"<title>{escape(name)}: {length * 1e3:.3f} ms</title>"
            parts.append(f'<rect {place} fill="{COLORS[r % len(COLORS)]}">{hint}</rect>')
    bottom = len(rows) * 22 + 14
    parts.append(f'<text x="150" y="{bottom}">0 ms</text>')
    parts.append(f'<text x="{WIDTH}" y="{bottom}" class="end">{(max(ends) - begin) * 1e3:.2f} ms</text>')
    return _figure(title, "".join(parts), bottom + 4)


class _Scale:
    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + 1
        margin = 0.05 * (y1 - y0) or abs(y1) * 0.1 or 1.0
        self.y0, self.y1 = y0 - margin if y0 < 0 or y0 > margin else 0.0, y1 + margin

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT)

    def y(self, value: float) -> float:
        return TOP + (self.y1 - value) / (self.y1 - self.y0) * (HEIGHT - BOTTOM - TOP)


def _axes(scale: _Scale, unit: str) -> str:
    parts = []
    for step in range(5):
        value = scale.y0 + (scale.y1 - scale.y0) * step / 4
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4:.1f}" class="end">{_short(value)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{scale.x0:g}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 6}" class="end">{scale.x1:g}</text>')
    if unit:
        parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" class="middle">iteration; {escape(unit)}</text>')
    return "".join(parts)


def _path(points: Points, scale: _Scale, color: str, opacity: float) -> str:
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.5" fill="{color}"/>'
    places = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.6" opacity="{opacity}"/>'


def _label(number: int, name: str, color: str) -> str:
    return f'<text x="{WIDTH - 4}" y="{TOP + 12 + 14 * number}" class="end" style="fill:{color}">{escape(name)}</text>'


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _figure(title: str, inside: str, height: float) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH + 4} {height:.0f}" role="img" aria-label="{escape(title)}">{inside}</svg></figure>'
    )
