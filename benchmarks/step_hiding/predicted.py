"""Planned times of this benchmark's steps, next to the committed results.

    python -m benchmarks.step_hiding.predicted

The plan of the same run gets two rates from the serial step: its computation and its waiting for messages.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.step_hiding.ways import SERIAL, flags
from benchmarks.support.table import print_table
from megapar.arguments import parse
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import Speed, predict

RESULTS = Path(__file__).with_name("results")
# Rows at which a product of these CPUs takes twice as long per row: at 512 positions, four slices take 1.13 times the
# serial computation (benchmarks/communication_hiding).
SMALL = 23.0
SCORES, MEMORY = 0.38, 0.5792  # shares of the peak in attention's core and of the bandwidth; a GPU reaches more


class Row(NamedTuple):
    """Seconds of a step of one way at one rate."""

    rate: str
    way: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured value."""
        return self.predicted / self.measured - 1


def rows() -> list[Row]:
    """Return all ways and rates of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        for rate in json.loads(path.read_text(encoding="utf-8"))["rates"]:
            serial = rate["ways"][SERIAL]
            kind = _fitted(serial["seconds"], sum(serial["waits"].values()))
            for way, figures in rate["ways"].items():
                found.append(Row(rate["rate"], way, figures["seconds"], _speed(way, kind).step_seconds))
    return found


def _fitted(seconds: float, waiting: float) -> DeviceKind:
    """Return a CPU on nodes of one rank, so fast that the serial step is planned as measured."""
    kind = replace(kinds()["cpu"], node=1)
    serial = _speed(SERIAL, kind)
    faster = (serial.step_seconds - serial.exposed_seconds) / (seconds - waiting)
    return replace(
        kind,
        flops={dtype: rate * faster for dtype, rate in kind.flops.items()},
        memory_bandwidth=kind.memory_bandwidth * faster,
        between=kind.between * serial.exposed_seconds / waiting,
    )


def _speed(way: str, kind: DeviceKind) -> Speed:
    """Return the plan of a way. Links are as their kind says, and messages do not slow the products of a CPU."""
    run = PlannedRun(parse("moe", ["--rules-only", "--world-size", "2", *flags(way)], {}, planning=True), kind)
    calibration = OperatorTime(run).calibration
    software = replace(calibration.software, scores=SCORES, memory=MEMORY)
    of_cpu = {"small": SMALL, "inside": 1.0, "between": 1.0, "shown": 0.0, "jitter": 0.0}
    return predict(run, replace(calibration, **of_cpu, software=software))


def main() -> None:
    """Print the table."""
    cells = [(*row[:2], *(f"{x:.4g}" for x in row[2:]), f"{row.error:+.0%}") for row in rows()]
    print_table(("rate", "way", "measured, s", "predicted, s", "error"), cells)


if __name__ == "__main__":
    main()
