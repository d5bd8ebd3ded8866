"""Planned memory and time of this benchmark's ways, next to the committed results.

    python -m benchmarks.recompute.predicted

Memory is from the formulas alone. Times are relative to those without recompute, so they need no rate; eight processes
share two cores, so the time of a step is the computation of all stages, without a pipeline bubble.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.recompute.rank import CONFIG, WAYS
from benchmarks.recompute.run import MICRO_BATCH, MICRO_BATCHES_PER_STAGE, REDUCED
from benchmarks.support.contest import paired
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.planning.memory import stage_memory
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms

RESULTS = Path(__file__).with_name("results")
NONE = "none"


def rows() -> list[Row]:
    """Return the ways of all committed results."""
    found = []
    for path in sorted(RESULTS.glob("????-??-??-cpu.json")):
        found += _of_result(path.name[: len("2026-11-21")], json.loads(path.read_text(encoding="utf-8")))
    return found


def _of_result(date: str, result: dict[str, Any]) -> list[Row]:
    """Return the ways of one result."""
    runs = {way: _run(way, result["mp"], result["pp"]) for way in WAYS}
    computation, found = _computation(runs[NONE]), []
    for way, run in runs.items():
        sizes, label = result["memory_bytes"][way], f"{date}, {way}"
        found.append(Row(label, "device MB", sizes["device"] / 1e6, _temporary(run) / 1e6))
        if sizes["host"]:
            host = max(stage_memory(run, stage).host for stage in range(result["pp"]))
            found.append(Row(label, "host MB", sizes["host"] / 1e6, host / 1e6))
        if way != NONE:
            times = result["rounds"]
            measured, predicted = paired(times[way], times[NONE]), _computation(run) / computation
            found.append(Row(label, "time of none", measured, predicted))
    return found


def _run(way: str, mp: int, pp: int) -> PlannedRun:
    """Return the planned run of a way."""
    batch = MICRO_BATCH * MICRO_BATCHES_PER_STAGE["cpu"] * pp
    flags = ["--config", str(CONFIG), *REDUCED, "--micro-batch-size", str(MICRO_BATCH), *WAYS[way]]
    flags += ["--global-batch-size", str(batch), "--mp-degree", str(mp), "--pp-degree", str(pp)]
    return planned("moe", [*flags, "--world-size", str(mp * pp)], cpu_on_nodes(mp * pp))


def _temporary(run: PlannedRun) -> float:
    """Return the most bytes of the step's tensors: all but parameters, optimizer state and host memory."""
    found = []
    for stage in range(run.config.grid.pp):
        memory = stage_memory(run, stage)
        found.append(memory.peak - memory.parameters - memory.optimizer - memory.host)
    return max(found)


def _computation(run: PlannedRun) -> float:
    """Return the seconds of computation of one micro-batch on all stages."""
    programs = StagePrograms(run, OperatorTime(run, cpu_calibration(run)))
    times = [programs.stage(stage) for stage in range(run.config.grid.pp)]
    return sum(time.both - time.exposed for time in times)


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
