"""``megapar plan --timeline``: a drawing of one layer's forward and backward, and the share of each link.

The layer is one in the middle of the first stage, with experts if any has. Where slices pass from layer to layer, it
has others like it before and after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.planning.kept_inputs import recompute_messages
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms
from megapar.planning.timeline import LINKS, Bar

WIDTH = 100  # characters of a lane
LANES = ("compute", "wait", *LINKS)
CHAIN = 4  # units that are run where slices pass between layers, the last but one of which is drawn
LEGEND = (
    "D dispatch, C combine, g all-gather, r reduce-scatter, s all-reduce, a all-to-all, k keys and values; "
    "' gradients; slice.piece"
)


@dataclass(frozen=True)
class Drawing:
    """One direction of the layer.

    Attributes:
        seconds: Its time.
        bars: What each lane does, from 0.
    """

    seconds: float
    bars: tuple[Bar, ...]

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time in which each lane is in use."""
        sums: defaultdict[str, float] = defaultdict(float)
        for bar in self.bars:
            sums[bar.lane] += (bar.end - bar.start) / self.seconds
        return {lane: sums[lane] for lane in LANES if sums[lane]}

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        events = [{"lane": b.lane, "name": _label(b), "start": b.start, "end": b.end} for b in self.bars]
        return {"seconds": self.seconds, "busy_shares": self.busy, "events": events}


@dataclass(frozen=True)
class LayerTimeline:
    """One layer.

    Attributes:
        name: Kind of layer.
        forward: Its forward.
        backward: Its backward, with the recomputation of its unit.
    """

    name: str
    forward: Drawing
    backward: Drawing

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        return {"layer": self.name, "forward": self.forward.to_dict(), "backward": self.backward.to_dict()}

    def describe(self) -> str:
        """Draw the layer as text."""
        lines = ["", f"timeline of a {self.name} layer and one micro-batch", f"  {LEGEND}"]
        for title, drawing in (("forward", self.forward), ("backward", self.backward)):
            shares = ", ".join(f"{lane.replace('_', ' ')} {share:.0%}" for lane, share in drawing.busy.items())
            lines.append(f"  {title}: {drawing.seconds * 1e3:.3f} ms; {shares}")
            lines += [f"    {lane.replace('_', ' '):10}{_lane(drawing, lane)}" for lane in drawing.busy]
        return "\n".join([*lines, ""])


def layer_timeline(run: PlannedRun) -> LayerTimeline:
    """Run the layer's program and keep what each lane does."""
    programs = StagePrograms(run, OperatorTime(run))
    chunk = run.stages.on(0)[0]
    units = programs.units(chunk, recompute_messages(run, 0))
    with_experts = [unit for unit in units if any(layer.name == "moe" for layer in unit.layers)] or units
    unit = with_experts[len(with_experts) // 2]
    if not programs.passes_slices:
        there, back = programs.draw([unit])
        forward, backward = _cut(there.bars, 0.0, there.now), _cut(back.bars, 0.0, back.now)
    else:  # from the start of one layer to the start of the next
        there, back = programs.draw([unit] * CHAIN)
        forward = _cut(there.bars, _start(there.bars, CHAIN - 2), _start(there.bars, CHAIN - 1))
        backward = _cut(back.bars, _start(back.bars, 1), _start(back.bars, 0))
    return LayerTimeline(unit.layers[-1].name, forward, backward)


def _start(bars: Sequence[Bar], unit: int) -> float:
    """Return the start of a unit's first work."""
    return min(b.start for b in bars if b.lane == "compute" and b.name.partition("|")[2].split(".")[0] == str(unit))


def _cut(bars: Sequence[Bar], start: float, end: float) -> Drawing:
    """Return what lanes do between two times."""
    inside = (bar for bar in bars if bar.start < end and bar.end > start)
    moved = (Bar(b.lane, b.name, max(b.start, start) - start, min(b.end, end) - start) for b in inside)
    return Drawing(end - start, tuple(_merged(sorted(moved, key=lambda bar: (bar.lane, bar.start)))))


def _merged(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Yield the bars, consecutive ones of one label as one."""
    last: Bar | None = None
    for bar in bars:
        if last is not None and (last.lane, last.end, _label(last)) == (bar.lane, bar.start, _label(bar)):
            last = last._replace(end=bar.end)
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def _label(bar: Bar) -> str:
    """Return the name without the place of the layer: the slice first; of a message inside an operator, its kind."""
    name, _, place = bar.name.partition("|")
    if " " in place and bar.lane != "compute":
        return place.partition(" ")[2].rstrip("0123456789")
    what, _, number = name.partition(" ")
    return f"{number} {what}".strip()


def _lane(drawing: Drawing, lane: str) -> str:
    """Draw one lane."""
    cells = [" "] * WIDTH
    for bar in drawing.bars:
        if bar.lane != lane:
            continue
        first = min(WIDTH - 1, round(bar.start / drawing.seconds * WIDTH))
        width = max(1, min(WIDTH, round(bar.end / drawing.seconds * WIDTH)) - first)
        text = (_label(bar) + "-" * width)[: width - 1] + "|" if width > 1 else _label(bar)[0]
        cells[first : first + width] = text
    return "".join(cells[:WIDTH]).rstrip()
