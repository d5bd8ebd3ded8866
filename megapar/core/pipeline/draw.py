"""Drawings of a simulated schedule: text for a terminal, SVG for a page.

One line per stage, time from left to right. ``F2`` is the forward of micro-batch 2, ``B2`` its backward, ``I2`` and
``W2`` the two parts of a split backward. With several chunks per stage the chunk comes first (``4F2``). ``=`` continues
the computation to its left, ``.`` is pipeline bubble.
"""

from __future__ import annotations

from html import escape

from megapar.core.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from megapar.core.pipeline.simulate import Simulation

_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#e0803c", INPUT: "#e0803c", WEIGHT: "#59a14f"}
_UNIT, _ROW, _LEFT, _TOP = 26, 30, 70, 34


def label(schedule: Schedule, action: Action) -> str:
    """Return the label of a computation, such as ``F2`` or ``4F2``."""
    chunk = str(action.chunk) if schedule.num_chunks > schedule.num_ranks else ""
    return f"{chunk}{action.kind}{action.micro_batch}"


def as_text(schedule: Schedule, simulation: Simulation) -> str:
    """Draw one line per stage; a column is one unit of time, and times are rounded to whole units."""
    names = [label(schedule, slot.action) for slots in simulation.slots for slot in slots]
    width = max(map(len, names)) + 1
    columns = round(simulation.end)
    lines = []
    for rank, slots in enumerate(simulation.slots):
        cells = ["."] * columns
        for slot in slots:
            first, last = round(slot.start), max(round(slot.start) + 1, round(slot.end))
            cells[first:last] = [label(schedule, slot.action), *["="] * (last - first - 1)]
        lines.append(f"stage {rank} |" + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines) + "\n"


def as_svg(schedule: Schedule, simulation: Simulation, title: str) -> str:
    """Draw the same as an SVG picture. Later chunks of a stage are darker."""
    width = _LEFT + round(simulation.end * _UNIT) + 20
    height = _TOP + _ROW * len(simulation.slots) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for rank, slots in enumerate(simulation.slots):
        y = _TOP + rank * _ROW
        lines.append(f'<text x="6" y="{y + 19}" font-size="12">stage {rank}</text>')
        lines += [_box(schedule, slot.action, slot.start, slot.end, y) for slot in slots]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(schedule: Schedule, action: Action, start: float, end: float, y: int) -> str:
    x, width = _LEFT + start * _UNIT, (end - start) * _UNIT
    turns = schedule.num_chunks // schedule.num_ranks
    opacity = 0.55 + 0.45 * (action.chunk // schedule.num_ranks + 1) / turns
    return (
        f'<g><title>{label(schedule, action)}</title><rect x="{x:g}" y="{y}" width="{width:g}" height="{_ROW - 4}" '
        f'fill="{_COLORS[action.kind]}" fill-opacity="{min(1.0, opacity):.2f}" stroke="white"/>'
        f'<text x="{x + width / 2:g}" y="{y + 18}" font-size="11" fill="white" text-anchor="middle">'
        f"{action.micro_batch}</text></g>"
    )
