"""Planned bytes and times of this benchmark, next to the committed results.

    python -m benchmarks.sharding.predicted

balance: bytes per rank, from the formulas alone. link: the plan gets two rates, from the computation alone and from
the messages of stage 1 alone. machine: it gets the computation of stage 1, and the links of the device table.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from benchmarks.sharding.shape import BALANCE, DECODER, OURS, SEQ_LENGTH, SERIAL, TRAINING
from benchmarks.support.device import StepParts, fitted, scaled
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.core.device.kinds import DeviceKind
from megapar.planning.memory import stage_memory
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import Speed, predict

RESULTS = Path(__file__).with_name("results")
MODEL = re.compile(r"^(.+): MiB on the fullest rank", re.MULTILINE)
MEASURED = re.compile(r"^\| (\d) +\| (\d) +\| ([\d.,]+) +\| ([\d.,]+) +\| ([\d.,]+) +\|", re.MULTILINE)
TOKENS = 2 * SEQ_LENGTH


def rows() -> list[Row]:
    """Return all parts of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*balance.md")):
        found += _balance(path.read_text(encoding="utf-8"))
    for path in sorted(RESULTS.glob("*.json")):
        for part, measured in json.loads(path.read_text(encoding="utf-8")).items():
            name, _, dtype = part.partition(" ")
            if name == "link":
                found += _link(f"link, {dtype}", dtype, measured["seconds"])
            elif name == "machine" and dtype:
                label = f"{path.name[: len('2026-11-21')]}, machine, {dtype}"
                found += _machine(label, dtype, measured["tokens_per_second"])
    return found


def _balance(text: str) -> list[Row]:
    """Return the bytes of each model, degree and stage: of parameters, gradients and optimizer state together."""
    found = []
    _, *parts = MODEL.split(text)
    for model, table in zip(parts[::2], parts[1::2], strict=True):
        for degree, stage, *sizes in MEASURED.findall(table):
            measured = sum(float(size.replace(",", "")) for size in sizes)
            predicted = _held(model, int(degree), stage) / 2**20
            found.append(Row(f"{model}, degree {degree}, stage {stage}", "MiB of a rank", measured, predicted))
    return found


def _held(model: str, degree: int, stage: str) -> float:
    """Return the planned bytes that are held between micro-batches, gradients before or after their reduction."""
    kind, flags, ep = BALANCE[model]
    own = (*flags, *(("--ep-degree", str(ep)) if degree > ep > 1 else ()))
    line = [*own, *(() if "--config" in flags else TRAINING), "--micro-batch-size", "1", "--data-path", "mock"]
    line += ["--sharding-stage", stage, "--dtype", "bf16", "--world-size", str(degree)]
    run = planned(kind, line, cpu_on_nodes(1))
    memory = stage_memory(run, 0)
    return memory.parameters + memory.optimizer + memory.gradients - (_reduced(run) if stage == "1" else 0.0)


def _reduced(run: PlannedRun) -> float:
    """Return the bytes of the gradients after their reduction, which stage 1 keeps only at the end of a step."""
    rows = (row for row in run.held(0) if row.trainable and run.shards(row) > 1)
    return float(sum(run.row_numel(row) * run.view.wide_bytes for row in rows))


def _link(label: str, dtype: str, seconds: dict[str, float]) -> list[Row]:
    """Return the steps over the slow link."""
    parts = StepParts(seconds["alone"], seconds["communication"])
    kind = fitted(cpu_on_nodes(1), partial(_serial, dtype), parts)
    return [Row(f"{label}, {name}", "step, s", seconds[name], _speed(name, dtype, kind).step_seconds) for name in OURS]


def _serial(dtype: str, kind: DeviceKind) -> StepParts:
    """Return the planned step of one rank, and the messages of stage 1 with nothing overlapped."""
    alone = planned("moe", [*DECODER, *TRAINING, "--dtype", dtype, "--world-size", "1"], kind)
    seconds = predict(alone, cpu_calibration(alone)).step_seconds
    return StepParts(seconds, _speed(SERIAL, dtype, kind).exposed_seconds)


def _machine(label: str, dtype: str, measured: dict[str, float]) -> list[Row]:
    """Return the tokens per second on one machine."""
    first, kind = next(iter(OURS)), cpu_on_nodes(2)
    kind = scaled(kind, measured[first] / (TOKENS / _speed(first, dtype, kind).step_seconds))
    found = []
    for name in OURS:
        if name in measured:
            predicted = TOKENS / _speed(name, dtype, kind).step_seconds
            found.append(Row(f"{label}, {name}", "tokens/s", measured[name], predicted, given=name == first))
    return found


def _speed(name: str, dtype: str, kind: DeviceKind) -> Speed:
    flags = [*DECODER, *TRAINING, "--dtype", dtype, "--global-batch-size", "2", "--world-size", "2", *OURS[name]]
    run = planned("moe", flags, kind)
    return predict(run, cpu_calibration(run))


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
