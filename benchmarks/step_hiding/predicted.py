"""Planned times of this benchmark's steps, next to the committed results.

    python -m benchmarks.step_hiding.predicted

The plan of the same run gets two rates from the serial step: its computation and its waiting for messages.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.step_hiding.ways import SERIAL, flags
from benchmarks.support.device import StepParts, fitted
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.core.device.kinds import DeviceKind
from megapar.planning.speed import Speed, predict

RESULTS = Path(__file__).with_name("results")


def rows() -> list[Row]:
    """Return all ways and rates of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        for rate in json.loads(path.read_text(encoding="utf-8"))["rates"]:
            serial = rate["ways"][SERIAL]
            waiting = sum(serial["waits"].values())
            kind = fitted(cpu_on_nodes(1), _serial, StepParts(serial["seconds"] - waiting, waiting))
            for way, figures in rate["ways"].items():
                seconds, name = _speed(way, kind).step_seconds, f"{rate['rate']}, {way}"
                found.append(Row(name, "step, s", figures["seconds"], seconds, given=way == SERIAL))
    return found


def _serial(kind: DeviceKind) -> StepParts:
    """Return the planned parts of the serial step."""
    serial = _speed(SERIAL, kind)
    return StepParts(serial.step_seconds - serial.exposed_seconds, serial.exposed_seconds)


def _speed(way: str, kind: DeviceKind) -> Speed:
    run = planned("moe", ["--world-size", "2", *flags(way)], kind)
    return predict(run, cpu_calibration(run))


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
