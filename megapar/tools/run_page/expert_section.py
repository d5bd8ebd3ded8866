"""The load of experts over the iterations: the busiest over the mean, and for a single run maps of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from megapar.tools.run_page.figures import COLORS, Curve, Figure, curves, heat
from megapar.tools.run_page.run_folder import RunFolder

EACH, BUSIEST = "Load of each expert", "Busiest expert over the mean"
COLUMNS, LEAST_COLUMNS = 60, 14  # of a map
LAYERS, EXPERTS = 64, 128  # rows of a map that a screen can show
CELLS = 110_000  # of the maps of all layers, a byte each, which keeps the page below 1.5 MB
_BALANCED, _REPLICAS = "1 is a balanced load.", "All replicas of an expert count together."


def expert_figures(runs: Sequence[RunFolder]) -> list[Figure]:
    """Return the busiest experts and ranks over the mean, and for a single run maps of the load of experts."""
    found: list[Figure | None] = []
    if len(runs) == 1 and runs[0].experts:
        found += [
            _of_layers(runs[0].experts, "max", "Most loaded expert of each layer"),
            _of_layers(runs[0].experts, "min", "Least loaded expert of each layer"),
            _of_experts([record for record in runs[0].experts if record.get("loads")]),
        ]
    found += [
        _busiest(runs, "max", BUSIEST, _BALANCED),
        _busiest(runs, "busiest_rank", "Busiest rank of experts over the mean", f"{_BALANCED} {_REPLICAS}"),
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
    return curves(f"{title}{of}", drawn, quantity="times", note=note)


def _of_layers(records: Sequence[Mapping[str, Any]], which: str, title: str) -> Figure | None:
    layers = len(records[0]["layers"])
    shown = spaced([record for record in records if len(record["layers"]) == layers], COLUMNS)
    kept = range(0, layers, max(1, -(-layers // LAYERS)))
    rows = [[record["layers"][layer][which] for record in shown] for layer in kept]
    return heat(title, {"": rows}, [f"layer {layer}" for layer in kept], [record["iteration"] for record in shown])


def _of_experts(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Return maps of expert x step, one for each layer; the first shown is that with the busiest expert."""
    if not records:
        return None
    layers, experts = (len(records[-1]["loads"]), len(records[-1]["loads"][0]))
    beside = -(-experts // EXPERTS)
    rows = -(-experts // beside)
    shown = spaced(
        [record for record in records if len(record["loads"]) == layers],
        max(LEAST_COLUMNS, min(COLUMNS, CELLS // (layers * rows))),
    )
    kept = range(0, layers, -(-layers * rows * len(shown) // CELLS))
    maps = {
        f"layer {layer}": [
            [_farthest(record["loads"][layer][first : first + beside]) for record in shown]
            for first in range(0, experts, beside)
        ]
        for layer in kept
    }
    busiest = max(range(len(kept)), key=lambda number: max(shown[-1]["loads"][kept[number]]))
    note = f"Of {beside} experts with neighbouring numbers, the one farthest from the mean." if beside > 1 else ""
    names = [f"expert {first}" for first in range(0, experts, beside)]
    columns = [record["iteration"] for record in shown]
    return heat(EACH, maps, names, columns, chosen=busiest, note=note, wide=True)


def spaced(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return at most ``count`` records in order, the last one of each stretch of iterations."""
    first, last = records[0]["iteration"], records[-1]["iteration"]
    width = (last - first + 1) / count
    return list({int((last - record["iteration"]) / width): record for record in records}.values())


def _farthest(loads: Sequence[float]) -> float:
    return max(loads, key=lambda load: abs(math.log(max(load, 1e-9))))
