"""Experts of a run: the busiest ones and the busiest ranks over the mean, and the load of each layer over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from megapar.tools.run_page.figures import COLORS, Curve, Figure, curves, heat
from megapar.tools.run_page.run_folder import RunFolder

COLUMNS, ROWS = 60, 64  # cells of a heat map that a screen can show
BALANCED = "1 is a balanced load."


def expert_figures(runs: Sequence[RunFolder]) -> list[Figure]:
    """Return the figures; the heat maps only for a single run."""
    found: list[Figure | None] = []
    if len(runs) == 1 and runs[0].experts:
        found += [
            _loads(runs[0].experts, "max", "Most loaded expert of each layer"),
            _loads(runs[0].experts, "min", "Least loaded expert of each layer"),
        ]
    found += [
        _busiest(runs, "max", "Busiest expert", BALANCED),
        _busiest(
            runs, "busiest_rank", "Busiest rank of experts", f"{BALANCED} All replicas of an expert count together."
        ),
    ]
    return [figure for figure in found if figure]


def _busiest(runs: Sequence[RunFolder], which: str, title: str, note: str) -> Figure | None:
    drawn = []
    for number, run in enumerate(runs):
        rows = [
            (record["iteration"], loads)
            for record in run.experts
            if (loads := [layer[which] for layer in record["layers"] if which in layer])
        ]
        means = [(iteration, fmean(loads)) for iteration, loads in rows]
        color = COLORS[number % len(COLORS)]
        drawn.append(Curve("mean of layers" if len(runs) == 1 else run.name, means, color, noisy=True))
        if len(runs) == 1 and any(len(loads) > 1 for _, loads in rows):
            worst = [(iteration, max(loads)) for iteration, loads in rows]
            drawn.append(Curve("worst layer", worst, COLORS[1], noisy=True))
    of = "" if len(runs) == 1 else ", mean of layers"
    return curves(f"{title} over the mean{of}", drawn, quantity="times", note=note)


def _loads(records: Sequence[Mapping[str, Any]], which: str, title: str) -> Figure | None:
    layers = len(records[0]["layers"])
    records = [record for record in records if len(record["layers"]) == layers]
    shown = records[:: max(1, -(-len(records) // COLUMNS))]
    kept = range(0, layers, max(1, -(-layers // ROWS)))
    rows = [[record["layers"][layer][which] for record in shown] for layer in kept]
    return heat(title, rows, [f"layer {layer}" for layer in kept], [record["iteration"] for record in shown])
