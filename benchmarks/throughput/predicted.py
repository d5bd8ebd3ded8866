"""Planned times of megapar's own steps, next to the committed results.

    python -m benchmarks.throughput.predicted

One process: the plan gets three rates of ERNIE's kernels, each alone: of a large product, of attention and of the
optimizer. DeepSeek-V3's form is planned with the rate of a large product on its own day. Two processes: the plan gets
the computation of ERNIE's race in the same layout, for ep 2 that of the sharded MoE, and the links of the device table.
One H200: the plan as a user gets it, whose shares of attention and of the bandwidth were measured on the same day.
Nothing is planned of other software.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from benchmarks.support.device import scaled
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from benchmarks.throughput.run import OURS, OWN_FLAGS, SHARED_EXPERTS
from benchmarks.throughput.shape import SHAPES
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import predict

RESULTS = Path(__file__).with_name("results")
DTYPE, GPU_DTYPE, GPU = "fp32", "bf16", "h200-141g"
AGAINST = "against eager"  # the later race of an H200
BACKWARD = 2.5  # of attention's core, relative to its forward
STATE_PASSES = 7  # over fp32 masters, moments and gradients: four are read, three written


@dataclass(frozen=True)
class Machine:
    """A CPU whose kernels were measured.

    Attributes:
        kind: Its rates.
        scores: Rate of attention's core, relative to a large product's.
    """

    kind: DeviceKind
    scores: float

    def seconds(self, model: str, ranks: int = 1, flags: Sequence[str] = ()) -> float:
        """Return the planned seconds of a step."""
        run = _run(model, self.kind, ranks, flags)
        calibration = cpu_calibration(run)
        software = replace(calibration.software, scores=self.scores, memory=1.0)
        return predict(run, replace(calibration, product=1.0, software=software)).step_seconds

    def with_rate(self, flops: float) -> Machine:
        """Return the machine with another rate of large products."""
        return replace(self, kind=replace(self.kind, flops={DTYPE: flops}))

    def with_step(self, seconds: float, model: str, ranks: int, flags: Sequence[str]) -> Machine:
        """Return the machine, scaled so that a step takes so long."""
        return replace(self, kind=scaled(self.kind, self.seconds(model, ranks, flags) / seconds))


def rows() -> list[Row]:
    """Return the races of the committed results."""
    races = [json.loads(line) for line in (RESULTS / "2026-11-22-cpu.jsonl").read_text(encoding="utf-8").splitlines()]
    alone, ernie, moe, experts, both = races
    machine = _machine(alone[f"ernie {DTYPE}"]["kernels"])
    found = [Row("ernie, one process", "step, s", _measured(alone, "ernie"), machine.seconds("ernie"))]
    found += _latent(machine)
    own = OWN_FLAGS["cpu", 2].split()
    found += _pair(machine, ("whole copies", own), ("ernie", both), ("moe", both))
    found += _pair(machine, ("sharded", ()), ("ernie", ernie), ("moe", moe))
    same = machine.with_step(_measured(moe, "moe"), "moe", 2, ())
    shared = same.seconds("moe", 2, SHARED_EXPERTS.split())
    return [*found, Row("moe, two processes, ep 2", "step, s", _measured(experts, "moe"), shared), *_on_gpu()]


def _machine(kernels: dict[str, float]) -> Machine:
    """Return the machine on which ERNIE's kernels take so many seconds in a step."""
    kind, flops = cpu_on_nodes(2), kernels["gemm_flops"]
    run = _run("ernie", kind, 1, ())
    scores = sum(operator.scores for operator in run.costs.attention) * run.sizes.num_layers * (1 + BACKWARD)
    state = STATE_PASSES * run.view.wide_bytes * sum(run.row_numel(row) for row in run.held(0) if row.trainable)
    kind = replace(kind, flops={DTYPE: flops}, memory_bandwidth=state / kernels["optimizer"])
    return Machine(kind, scores / kernels["attention"] / flops)


def _on_gpu() -> Iterator[Row]:
    """Yield the steps on one H200, planned as a user plans them."""
    for line in (RESULTS / "2026-11-26-h200.jsonl").read_text(encoding="utf-8").splitlines():
        race = json.loads(line)
        if (race["race"], race["contestant"]) == (AGAINST, OURS):
            run = _run(race["model"], kinds()[GPU], 1, (), "cuda")
            yield Row(f"{race['model']}, one H200", "step, s", race["seconds"], predict(run).step_seconds)


def _latent(machine: Machine) -> Iterator[Row]:
    """Yield the steps of the decoder with latent attention."""
    for line in (RESULTS / "2026-11-24-mla-cpu.jsonl").read_text(encoding="utf-8").splitlines():
        race = json.loads(line)
        if race["contestant"] == OURS:
            there = machine.with_rate(race["rounds"][0]["peak_flops"])
            yield Row(f"{race['model']}, one process", "step, s", race["seconds"], there.seconds(race["model"]))


def _pair(
    machine: Machine, layout: tuple[str, Sequence[str]], first: tuple[str, Any], second: tuple[str, Any]
) -> Iterator[Row]:
    """Yield the steps of two models on two processes, the first of which gives the computation.

    Args:
        machine: The machine.
        layout: Its name and flags.
        first: A model and its race.
        second: Another model and its race.
    """
    name, flags = layout
    (given, race), (other, later) = first, second
    machine = machine.with_step(_measured(race, given), given, 2, flags)
    for model, found in ((given, race), (other, later)):
        seconds = machine.seconds(model, 2, flags)
        label = f"{model}, two processes, {name}"
        yield Row(label, "step, s", _measured(found, model), seconds, given=model == given)


def _measured(race: dict[str, Any], model: str) -> float:
    return float(race[f"{model} {DTYPE}"]["seconds"][OURS])


def _run(model: str, kind: DeviceKind, ranks: int, flags: Sequence[str], device: str = "cpu") -> PlannedRun:
    """Return the planned run of a model, which is read from its class's config.json."""
    shape, dtype = SHAPES[device][model], DTYPE if device == "cpu" else GPU_DTYPE
    config = getattr(transformers, shape.config_class)(**shape.config, architectures=[shape.architecture])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        line = ["--load-hf", folder, "--seq-length", str(shape.seq_length), *shape.flags, "--dtype", dtype]
        line += ["--micro-batch-size", str(shape.micro_batch // ranks), "--world-size", str(ranks), *flags]
        return planned(shape.kind, line, kind)


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
