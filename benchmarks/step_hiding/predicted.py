"""Planned times of this benchmark's steps, next to the committed results.

    python -m benchmarks.step_hiding.predicted

The plan of the same run gets two rates from the serial step: its computation and its waiting for messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.step_hiding.ways import SERIAL, flags
from benchmarks.support.device import scaled
from benchmarks.support.table import print_table
from megapar.arguments import parse
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.planning.calibration import Calibration
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import Speed, predict

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Row:
    """One way at one rate, in seconds of a step.

    Attributes:
        rate: Rate of the link.
        way: Name of the way.
        measured: Measured time.
        predicted: Planned time.
    """

    rate: str
    way: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def rows() -> list[Row]:
    """Return all ways and rates of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        for rate in json.loads(path.read_text(encoding="utf-8"))["rates"]:
            serial = rate["ways"][SERIAL]
            kind = _kind(serial["seconds"], sum(serial["waits"].values()))
            for way, figures in rate["ways"].items():
                found.append(Row(rate["rate"], way, figures["seconds"], _speed(way, kind).step_seconds))
    return found


def _kind(step: float, waiting: float) -> DeviceKind:
    """Return a CPU whose serial step has the measured time, of which so much is waiting for messages."""
    kind = replace(kinds()["cpu"], node=1)
    serial = _speed(SERIAL, kind)
    faster = (serial.step_seconds - serial.exposed_seconds) / (step - waiting)
    return scaled(kind, faster, serial.exposed_seconds / waiting)


def _speed(way: str, kind: DeviceKind) -> Speed:
    run = PlannedRun(parse("moe", ["--rules-only", "--world-size", "2", *flags(way)], {}, planning=True), kind)
    calibration: Calibration = OperatorTime(run).calibration
    return predict(run, replace(calibration, shown=0.0))  # a CPU's messages do not slow its products


def main() -> None:
    """Print the table."""
    columns = ["rate", "way", "measured", "predicted", "error"]
    print_table(
        columns, [[r.rate, r.way, f"{r.measured:.2f}", f"{r.predicted:.2f}", f"{r.error:+.0%}"] for r in rows()]
    )


if __name__ == "__main__":
    main()
