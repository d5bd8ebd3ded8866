"""The page of ``megapar plan --html``: the verdict, memory by stage, the parts of a step, ranks, a search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from megapar.core.grid import Grid
from megapar.core.units import GIBIBYTE, billions
from megapar.planning.plan import Plan
from megapar.planning.search import Result, Search, named
from megapar.planning.text import Drawing, label, layer_timeline, verdict
from megapar.tools.run_page.document import PageSection, document
from megapar.tools.run_page.figures import COLORS, Figure, Lane, Scattered, StackedBar, bars, scatter, spans
from megapar.tools.run_page.plan_comparison import MEMORY_COLORS, PARTS, TIME_COLORS, planned_parts

MOST_RANKS = 4096
MOST_STAGES = 24
_RESERVED = {"tensors": "#2563eb", "communicators": "#9333ea", "driver and fragments": "#475569"}
_BEST, _FITS, _TOO_LARGE, _UNDECIDED = "the fastest", "fits", "does not fit", "too slow to look at its memory"
_AXES = ("pp", "dp", "sharding", "cp", "mp", "ep")


def plan_page(plan: Plan, search: Search | None = None, command: str = "") -> str:
    """Return the page of a plan; of a search's fastest one, with all that it tried and the command that starts it."""
    sections = [
        PageSection(
            "Search",
            [figure for figure in (_search(search),) if figure],
            f"<pre>{escape(command)}</pre>" if command else "",
        ),
        PageSection("Memory", [figure for figure in _memory(plan) if figure]),
        PageSection("Step", [figure for figure in (_step(plan), *_layer(plan)) if figure]),
        PageSection("Ranks", html=ranks_by_node(plan.config.grid, plan.run.node)),
    ]
    title = (
        f"megapar plan: {billions(plan.counts.total)} parameters on {plan.config.grid.world_size:,} {plan.kind.name}"
    )
    return document(title, _tiles(plan), sections)


def _tiles(plan: Plan) -> str:
    cells = []
    for name, value in verdict(plan).items():
        main, more, *_ = [*re.split(r", | (?=of |for )", value, maxsplit=1), ""]
        small = f"<span>{escape(more)}</span><br>" if more else ""
        long = " class=long" if len(main) > 12 else ""
        cells.append(f"<div{long}><b>{escape(main)}</b>{small}<span>{escape(name)}</span></div>")
    return f'<div class="tiles">{"".join(cells)}</div>'


def _memory(plan: Plan) -> Iterator[Figure | None]:
    stages = plan.memory[:MOST_STAGES]
    left_out = f" {len(plan.memory) - len(stages)} more stages are left out." * (len(plan.memory) > len(stages))
    reserved = [
        StackedBar(
            f"stage {one.stage}",
            {
                "tensors": one.peak,
                "communicators": one.groups,
                "driver and fragments": one.reserved - one.peak - one.groups,
            },
        )
        for one in stages
    ]
    note = f"The line is the memory of a device.{left_out}"
    yield bars("Memory that a rank reserves", reserved, _RESERVED, "bytes", note, limit=plan.kind.memory_bytes)
    parts = [
        StackedBar(f"stage {one.stage}", {part: getattr(one, part) for part in MEMORY_COLORS if hasattr(one, part)})
        for one in stages
    ]
    note = PARTS.replace("stage 0", "each stage")
    yield bars("Tensors of a rank", parts, MEMORY_COLORS, "bytes", note)


def _step(plan: Plan) -> Figure | None:
    return bars(
        "Where the time of a step goes", [StackedBar("plan", planned_parts(plan.speed))], TIME_COLORS, "seconds"
    )


def _layer(plan: Plan) -> Iterator[Figure | None]:
    timeline = layer_timeline(plan.run)
    for title, drawing in (("forward", timeline.forward), ("backward", timeline.backward)):
        yield spans(f"A {timeline.name} layer and one micro-batch: {title}", _lanes(drawing), {})


def _lanes(drawing: Drawing) -> list[Lane]:
    lanes = {lane: Lane(lane.replace("_", " ")) for lane in drawing.busy}
    for bar in drawing.bars:
        lanes[bar.lane].spans.append((bar.start, bar.end, label(bar)))
    return list(lanes.values())


def ranks_by_node(grid: Grid, node: int) -> str:
    """Return a picture of each axis above 1: a row per node, a cell per rank, colored by its place on the axis."""
    text = f"<p>{escape(grid.describe())}; nodes of {node} ranks</p>"
    if grid.world_size == 1 or grid.world_size > MOST_RANKS:
        return text
    coordinates = [grid.coordinates(rank) for rank in range(grid.world_size)]
    axes = [axis for axis in _AXES if grid.size(axis) > 1]
    return text + "".join(
        f'<div class="axis"><h3>{axis} {grid.size(axis)}</h3>{_nodes(coordinates, axis, node)}</div>' for axis in axes
    )


def _nodes(coordinates: Sequence[dict[str, int]], axis: str, node: int) -> str:
    rows = []
    for first in range(0, len(coordinates), node):
        cells = "".join(
            f'<i style="background:{COLORS[at[axis] % len(COLORS)]}" title="rank {rank}: '
            f'{", ".join(f"{name} {place}" for name, place in at.items())}"></i>'
            for rank, at in enumerate(coordinates[first : first + node], first)
        )
        rows.append(f"<div>{cells}</div>")
    return f'<div class="nodes">{"".join(rows)}</div>'


def _search(search: Search | None) -> Figure | None:
    if search is None:
        return None
    best = search.offered[0] if search.best else None
    points = [
        Scattered(_group(result, best), result.first_stage / GIBIBYTE, result.seconds, named(result.candidate))
        for result in search.results.values()
        if result.plan is not None
    ]
    colors = {_UNDECIDED: "#e2e8f0", _TOO_LARGE: "#94a3b8", _FITS: "#2563eb", _BEST: "#ea580c"}
    note = f"{len(search.results):,} layouts, {len(points):,} of them legal. Both axes are logarithmic."
    return scatter("Layouts", points, colors, ("GiB of the first stage", "seconds per step"), note)


def _group(result: Result, best: Result | None) -> str:
    if result is best:
        return _BEST
    if "fits" not in vars(result):
        return _UNDECIDED
    return _FITS if result.fits else _TOO_LARGE
