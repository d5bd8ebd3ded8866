"""Planned times of this benchmark's steps, next to the measured ones in README.md.

    python -m benchmarks.ampipe_rows.predicted

The plan of the same run gets the rates to which the links are set, and at each the base's computation: its step without
the time that it waits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.ampipe_rows.rows import flags
from benchmarks.support.device import link_bytes, scaled
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.core.device.kinds import DeviceKind
from megapar.planning.speed import Speed, predict

README = Path(__file__).with_name("README.md")
RANKS, NODE = 4, 2
INSIDE = 1e9  # bits per second, which the ranks of a node share like the link between nodes
LINK = re.compile(r"^(\d+) Mbit/s", re.MULTILINE)
MEASURED = re.compile(r"^\| ([\w, -]+?) \| ([\d.]+) \|[^|]*\|[^|]*\|[^|]*\| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
BASE = "base"


class Measured(NamedTuple):
    """A row of a table.

    Attributes:
        seconds: Seconds of a step.
        waited: Seconds of it that the slowest rank waited for the other node and within its node.
    """

    seconds: float
    waited: float


def rows() -> list[Row]:
    """Return the rows of both tables."""
    found = []
    for megabits, table in tables().items():
        links = link_bytes(INSIDE, NODE), link_bytes(megabits * 1e6, NODE)
        kind = replace(cpu_on_nodes(NODE), inside=links[0], between=links[1])
        base = _speed(BASE, kind)
        computation = table[BASE].seconds - table[BASE].waited
        kind = scaled(kind, (base.step_seconds - base.exposed_seconds) / computation)
        for name, measured in table.items():
            label = f"{megabits} Mbit/s, {name}"
            found.append(Row(label, "step, s", measured.seconds, _speed(name, kind).step_seconds))
    return found


def tables() -> dict[int, dict[str, Measured]]:
    """Return the README's rows by Mbit/s between the nodes and name."""
    _, *parts = LINK.split(README.read_text(encoding="utf-8"))
    return {
        int(megabits): {
            name: Measured(float(seconds), float(ep) + float(mp)) for name, seconds, ep, mp in MEASURED.findall(text)
        }
        for megabits, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _speed(name: str, kind: DeviceKind) -> Speed:
    run = planned("moe", ["--world-size", str(RANKS), *flags(name)], kind)
    return predict(run, cpu_calibration(run))


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
