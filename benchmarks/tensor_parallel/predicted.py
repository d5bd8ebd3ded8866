"""Planned times of this benchmark's steps, next to the committed results.

    python -m benchmarks.tensor_parallel.predicted

hidden: the plan gets two rates at the slowest link, from the step without messages and from the blocking one; at the
others the link is as much faster as its rate. speed: it gets the computation of one process. Products that are not
split while messages travel are not planned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.support.device import StepParts, fitted, scaled
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from benchmarks.tensor_parallel.shape import SHAPES
from megapar.core.device.kinds import DeviceKind
from megapar.planning.operator_time import OperatorTime
from megapar.planning.speed import predict
from megapar.planning.stage_time import StagePrograms, StageTime

RESULTS = Path(__file__).with_name("results")
SEQUENCE_PARALLEL = ("--mp-degree", "2", "--sequence-parallel")
WAYS = {"blocking": "off", "pieces": "on"}  # the values of --tp-comm-overlap
LAYOUTS = {"megapar mp 2": ("--mp-degree", "2"), "megapar mp 2, sequence parallel": SEQUENCE_PARALLEL}


def rows() -> list[Row]:
    """Return the links and layouts of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found += _hidden(result["hidden"]) if "hidden" in result else []
        found += _speed(path.name[: len("2026-11-21")], result["speed"]["tokens_per_second"])
    return found


def _hidden(links: list[dict[str, Any]]) -> list[Row]:
    """Return the steps over the links, the slowest of which is the first."""
    first = links[0]["seconds"]
    parts = StepParts(first["alone"], first["blocking"] - first["alone"])
    kind, found = fitted(cpu_on_nodes(1), _blocking, parts), []
    for link in links:
        wider = _megabits(link["link"]) / _megabits(links[0]["link"])
        for way in WAYS:
            seconds = _sample(way, scaled(kind, 1.0, wider)).both
            given = link is links[0] and way == "blocking"
            found.append(Row(f"{link['link']}, {way}", "step, s", link["seconds"][way], seconds, given=given))
    return found


def _megabits(link: str) -> float:
    """Return the rate of a link as tc writes it."""
    return float(link.removesuffix("mbit"))


def _blocking(kind: DeviceKind) -> StepParts:
    """Return the planned parts of the step whose collectives block."""
    time = _sample("blocking", kind)
    waited = time.forward.waited + time.backward.waited
    return StepParts(time.both - waited, waited)


def _sample(way: str, kind: DeviceKind) -> StageTime:
    """Return the planned time of the forward and backward of one sample."""
    flags = [*SHAPES["cpu"].flags(), *SEQUENCE_PARALLEL, "--tp-comm-overlap", WAYS[way]]
    run = planned("moe", ["--dtype", "fp32", "--world-size", "2", *flags], kind)
    return StagePrograms(run, OperatorTime(run, cpu_calibration(run))).stage(0)


def _speed(date: str, measured: dict[str, float]) -> list[Row]:
    """Return the tokens per second of two processes that have one of two cores each, all cores of one process."""
    alone = measured["megapar, one process"]
    kind = cpu_on_nodes(2)
    both = scaled(kind, alone / _tokens_per_second((), 1, kind))
    each = scaled(both, 0.5)
    return [
        Row(f"{date}, {name}", "tokens/s", measured[name], _tokens_per_second(flags, 2, each))
        for name, flags in LAYOUTS.items()
    ]


def _tokens_per_second(layout: tuple[str, ...], ranks: int, kind: DeviceKind) -> float:
    """Return the planned tokens per second of whole steps."""
    flags = [*SHAPES["cpu"].flags(), "--dtype", "fp32", "--global-batch-size", "1", "--micro-batch-size", "1"]
    run = planned("moe", [*flags, "--world-size", str(ranks), *layout], kind)
    return predict(run, cpu_calibration(run)).tokens_per_second


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
