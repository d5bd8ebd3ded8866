"""Planned times of this benchmark's steps, next to the committed results.

    python -m benchmarks.node_dispatch.predicted

The plan gets the computation of the plain step without a limit, and the rate to which the link is set.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.node_dispatch.shape import NODE, RANKS, SHAPES, WAYS, Shape
from benchmarks.support.device import link_bytes, scaled
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.core.device.kinds import DeviceKind
from megapar.planning.speed import predict

RESULTS = Path(__file__).with_name("results")
FREE = 1e12  # bytes per second of a link without a limit, whose copies are part of the computation
NO_LIMIT = "no limit"


def rows() -> list[Row]:
    """Return all shapes, shares and ways of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for measured in result["shapes"]:
            found += _of_shape(measured["shape"], result["seconds"][measured["shape"]], measured["shares"])
    return found


def _of_shape(name: str, seconds: dict[str, dict[str, float]], shares: list[dict[str, float]]) -> list[Row]:
    """Return the rows of a shape, from its seconds by share and way, and the link's rate for each share."""
    shape, plain, found = SHAPES[name], WAYS[0], []
    free = replace(cpu_on_nodes(NODE), inside=FREE, between=FREE)
    free = scaled(free, _step(shape, plain, free) / seconds[NO_LIMIT][plain])
    limited = [replace(free, between=link_bytes(share["rate"], NODE)) for share in shares]
    for (share, ways), kind in zip(seconds.items(), [*limited, free], strict=True):
        for way in WAYS:
            label, given = f"{name}, {share}, {way}", (share, way) == (NO_LIMIT, plain)
            found.append(Row(label, "step, s", ways[way], _step(shape, way, kind), given=given))
    return found


def _step(shape: Shape, way: str, kind: DeviceKind) -> float:
    """Return the planned seconds of a step."""
    run = planned("moe", ["--world-size", str(RANKS), *shape.flags(way)], kind)
    return predict(run, cpu_calibration(run)).step_seconds


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
