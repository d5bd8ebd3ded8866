"""Steps of this benchmark by the simulated schedules of the planner, next to the committed results.

    python -m benchmarks.pipeline.predicted

The plan gets the time that a layer sleeps; messages and Python take no time in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.support.prediction import Row, print_rows
from megapar.core.pipeline.schedule import make_schedule
from megapar.core.pipeline.simulate import simulate

RESULTS = Path(__file__).with_name("results")
STAGES, MICRO_BATCHES, UNIT_SECONDS = 4, 8, 0.1  # the defaults of ``run``


def rows() -> list[Row]:
    """Return the schedules of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        for label, figures in json.loads(path.read_text(encoding="utf-8"))["bubble"].items():
            name, chunks = label.removesuffix(" chunks").split(", ")
            bubble = simulate(make_schedule(name, STAGES, int(chunks), MICRO_BATCHES)).bubble_share
            seconds = 3 * MICRO_BATCHES * UNIT_SECONDS / (1 - bubble)
            found.append(Row(label, "step, s", figures["seconds"], seconds))
    return found


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
