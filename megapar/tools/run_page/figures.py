"""Figures as data: curves, bars, heat maps and timelines, which ``page.js`` draws with ECharts.

A figure is thinned to what a screen can show, so that the page of a long run stays as small as that of a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.core.units import GIBIBYTE, MEGABYTE

Points = Sequence[tuple[float, float]]

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#0891b2", "#db2777", "#65a30d", "#b45309", "#475569", "#dc2626")
GRAY = "#cbd5e1"
SPANS = 4000  # of a timeline
NOISY_POINTS = 100  # a curve of fewer points is shown as it is, without a mean
OCTAVES, LEVELS = 5, 8  # loads of maps are from 1/32 to 32, in steps of an eighth of an octave: 9 %
LETTERS = "".join(
    letter for letter in map(chr, range(35, 127)) if letter not in "&<>\\"
)  # as they are in JSON and HTML
_SIZES = {
    "bytes": ((GIBIBYTE, "GiB"), (MEGABYTE, "MiB"), (2**10, "KiB"), (1, "bytes")),
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "share": ((0.01, "%"),),
}


@dataclass(frozen=True)
class Curve:
    """One curve.

    Attributes:
        points: (iteration, value).
        noisy: Draw it faintly with its mean on top, if it has enough points.
        dots: Mark each point; for values that only some iterations have.
        steps: Keep the value up to the next point, instead of a straight line to it.
        line: ``solid``, ``dashed`` or ``dotted``.
    """

    name: str
    points: Points
    color: str
    noisy: bool = False
    dots: bool = False
    steps: bool = False
    line: str = "solid"


@dataclass(frozen=True)
class Figure:
    """A figure with its caption.

    Attributes:
        kind: Name of the function in ``page.js`` that draws it.
        body: Input of that function, as JSON values.
        wide: It has the whole width of the page.
        choices: Names of its maps, of which it shows one at a time; none if there is one.
        chosen: Number of the one that it shows first.
    """

    title: str
    kind: str
    body: Mapping[str, Any]
    unit: str = ""
    note: str = ""
    wide: bool = False
    height: int = 250
    choices: Sequence[str] = ()
    chosen: int = 0


@dataclass(frozen=True)
class StackedBar:
    """A horizontal bar of parts: name -> value."""

    name: str
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Scattered:
    """A point of a scatter plot: its group, which has a color, its place, and its name."""

    group: str
    x: float
    y: float
    name: str


@dataclass
class Lane:
    """A row of a timeline, with (start, end, name) in seconds."""

    name: str
    spans: list[tuple[float, float, str]] = field(default_factory=list)


def curves(
    title: str,
    drawn: Iterable[Curve],
    *,
    quantity: str = "",
    levels: Mapping[str, float] | None = None,
    from_zero: bool = False,
    note: str = "",
) -> Figure | None:
    """Return a figure of curves over iterations; None without points.

    Args:
        drawn: The curves. Points that are not finite are left out.
        quantity: ``bytes``, ``seconds`` or ``share`` (shown in a fitting unit), or the unit itself.
        levels: Name -> value of a horizontal line.
        from_zero: The axis begins at 0.
    """
    finite = [(curve, [(x, y) for x, y in curve.points if math.isfinite(y)]) for curve in drawn]
    finite = [(curve, points) for curve, points in finite if points]
    if not finite:
        return None
    levels = levels or {}
    size, unit = scale(quantity, [abs(y) for _, points in finite for _, y in points] + list(levels.values()))
    rows = []
    for curve, points in finite:
        scaled = [(x, y / size) for x, y in points]
        row: dict[str, Any] = {"name": curve.name, "color": curve.color, "line": curve.line, "points": scaled}
        row |= {"dots": curve.dots, "steps": curve.steps}
        if curve.noisy and len(points) > NOISY_POINTS:
            row["mean"] = centered_mean(scaled, mean_width(len(points)))
        rows.append(row)
    means = sorted({mean_width(len(points)) for curve, points in finite if curve.noisy and len(points) > NOISY_POINTS})
    if means:
        width = f"{means[0]}" if len(means) == 1 else f"{means[0]} to {means[-1]}"
        note = f"{note} Bold: mean of {width} steps around each step.".strip()
    lines = [{"name": name, "value": value / size} for name, value in levels.items()]
    body = {"curves": rows, "levels": lines, "zero": from_zero}
    return Figure(title, "curves", body, unit, note)


def bars(
    title: str,
    rows: Sequence[StackedBar],
    colors: Mapping[str, str],
    quantity: str,
    note: str = "",
    *,
    wide: bool = True,
    limit: float = 0.0,
) -> Figure | None:
    """Return a figure of bars, parts by color, with a line at ``limit`` in the quantity (0: none); None without any."""
    if not rows:
        return None
    size, unit = scale(quantity, [*(sum(row.parts.values()) for row in rows), limit])
    parts = [
        {"name": part, "color": color, "values": [row.parts.get(part, 0.0) / size for row in rows]}
        for part, color in colors.items()
        if any(row.parts.get(part) for row in rows)
    ]
    body = {"bars": [row.name for row in rows], "parts": parts, "limit": limit / size}
    return Figure(title, "bars", body, unit, note, wide=wide, height=110 + 40 * len(rows))


def heat(
    title: str,
    maps: Mapping[str, Sequence[Sequence[float]]],
    names: Sequence[str],
    columns: Sequence[int],
    *,
    chosen: int = 0,
    note: str = "",
    wide: bool = False,
) -> Figure | None:
    """Return a heat map of loads relative to their mean, all on the same scale of colors; None without values.

    A load is a letter of ``LETTERS``, as there may be many.

    Args:
        maps: Name of a map -> its rows: for each of ``names``, one load per column; 1 is the mean.
        names: Labels of the rows, from the top.
        chosen: Number of the map that is shown first.
    """
    if not maps or not names or not columns:
        return None
    texts = ["".join(_letter(load) for row in rows for load in row) for rows in maps.values()]
    body = {"maps": texts, "names": names, "columns": columns, "letters": LETTERS, "octaves": OCTAVES, "levels": LEVELS}
    choices, height = list(maps) if len(maps) > 1 else (), max(240, min(480, 120 + 14 * len(names)))
    unit = "load relative to the mean"
    return Figure(title, "heat", body, unit, note, wide=wide, height=height, choices=choices, chosen=chosen)


def _letter(load: float) -> str:
    octaves = math.log2(max(load, 2.0**-OCTAVES))
    return LETTERS[round(LEVELS * (OCTAVES + min(octaves, OCTAVES)))]


def scatter(
    title: str, points: Sequence[Scattered], colors: Mapping[str, str], axes: tuple[str, str], note: str = ""
) -> Figure | None:
    """Return a scatter plot with logarithmic axes, a color per group, the last on top; None without points."""
    if not points:
        return None
    groups = [
        {"name": name, "color": color, "points": [(one.x, one.y, one.name) for one in points if one.group == name]}
        for name, color in colors.items()
    ]
    body = {"groups": [group for group in groups if group["points"]], "axes": axes}
    return Figure(title, "scatter", body, "", note, wide=True, height=420)


def spans(title: str, lanes: Sequence[Lane], colors: Mapping[str, str], note: str = "") -> Figure | None:
    """Return a timeline, from the first start; None without spans.

    Args:
        lanes: Rows, from the top.
        colors: Name of a span -> its color, which the key has as well; others have their lane's.
    """
    lanes = [lane for lane in lanes if lane.spans]
    if not lanes:
        return None
    begin = min(start for lane in lanes for start, _, _ in lane.spans)
    end = max(end for lane in lanes for _, end, _ in lane.spans)
    size, unit = scale("seconds", [end - begin])
    names: dict[str, int] = {}
    rows = []
    finest = (end - begin) * max(1 / 1000, len(lanes) / SPANS)
    for number, lane in enumerate(lanes):
        for start, stop, name in joined(lane.spans, finest):
            at = names.setdefault(name, len(names))
            rows.append((number, (start - begin) / size, (stop - begin) / size, at))
    key = [{"name": name, "color": color} for name, color in colors.items() if name in names]
    body = {"lanes": [lane.name for lane in lanes], "spans": rows, "names": list(names), "key": key}
    return Figure(title, "spans", body, unit, note, wide=True, height=100 + 34 * len(lanes))


def scale(quantity: str, values: Sequence[float]) -> tuple[float, str]:
    """Return the size of the unit in which the largest value is at least 1, and its name."""
    sizes = _SIZES.get(quantity)
    if sizes is None:
        return 1.0, quantity
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    return next((row for row in sizes if most >= row[0]), sizes[-1])


def mean_width(points: int) -> int:
    """Return the number of steps, an odd one, over which a noisy curve of this many points is averaged."""
    return 2 * max(2, points // 100) + 1


def centered_mean(points: Points, width: int) -> list[tuple[float, float]]:
    """Return the mean of ``width`` points around each: unlike a moving average it does not lag behind the curve.

    Near the ends it averages fewer points, equally many on both sides; within ``width // 8`` of an end there is none.
    """
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    means = []
    for place in range(width // 8, len(points) - width // 8):
        half, x = min(width // 2, place, len(points) - 1 - place), points[place][0]
        means.append((x, (sums[place + half + 1] - sums[place - half]) / (2 * half + 1)))
    return means


def thinned(points: Points, limit: int) -> list[tuple[float, float]]:
    """Return at most about ``limit`` points: of consecutive ones the lowest and the highest, and both ends."""
    if len(points) <= limit:
        return list(points)
    inner, parts = points[1:-1], max(1, (limit - 2) // 2)
    kept = [points[0]]
    for part in range(parts):
        piece = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])} if piece else set()
        kept += sorted(ends)
    return [*kept, points[-1]]


def joined(parts: Sequence[tuple[float, float, str]], finest: float) -> list[tuple[float, float, str]]:
    """Return spans in order as a screen can show them: of those that overlap, and of short ones, several as one.

    Args:
        parts: (start, end, name) of each.
        finest: The shortest span, and the shortest gap, that is shown.
    """
    shown: list[tuple[float, float, str]] = []
    for start, end, name in sorted(parts):
        if shown:
            first, last, before = shown[-1]
            short = end - start < finest and last - first < finest
            if start < last or (start - last < finest and (short or name == before)):
                both = name if name == before else f"{before.removesuffix(' ...')} ..."
                shown[-1] = (first, max(last, end), both)
                continue
        shown.append((start, end, name))
    return shown
