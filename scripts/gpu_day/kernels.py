"""Profiler counts of kernels per torch operator and per layer, next to the table and the budgets.

The kernels of a layer are the difference between two depths. Buffers that a library clears before its kernels count
apart, as the driver fills them. ``kernels.json`` next to the findings contains the calls, and the kernels and fills per
call of every operator, as needed for the table in ``scripts.tracing.kernels``: a row with a count is no longer
estimated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from megapar.core.device.accelerators import pick
from megapar.trainer import Trainer
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.trainers import flags, kind, parsed, step_seconds, trainer
from scripts.tracing.kernels import KERNELS, kernels_of

RUNS = {
    "dense": ("dense", ""),
    "moe": ("moe", "--moe-model-type megatron_moe"),
    "capacity": ("moe", "--moe-model-type deepspeed_moe"),
    "ernie": ("ernie", ""),
}
OPERATOR = "aten::"
MOVES, FILL = ("Memcpy HtoD", "Memcpy DtoH"), "Memset"  # names in a profile of what is not a kernel
PLAN_SECONDS = 90.0
STEPS, LONGEST, NAME = 2, 40, 110  # of a profile of steps


@dataclass
class Counted:
    """Counts of one step.

    Attributes:
        launches: Kernels of any kind.
        fills: Buffers that a kernel's library clears before it, which the driver does without a kernel.
        copies: Copies between host and device.
        calls: Calls per operator.
        kernels: Kernels per operator.
        filled: Fills per operator.
    """

    launches: int = 0
    fills: int = 0
    copies: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    filled: Counter[str] = field(default_factory=Counter)


def run(day: Day) -> None:
    """Count every run at two depths, then write the table of all operators."""
    total = Counted()
    for name, (model, more) in list(RUNS.items())[: 1 if day.small else None]:
        day.attempt(name, partial(_layer, day, model, more, total), least=5.0)
    if total.calls:
        day.attempt("operators", partial(_table, day, total))
    for name, (model, more) in list(RUNS.items())[: 1 if day.small else 2]:
        day.attempt(f"planned {name}", partial(_planned, day, name, model, more), least=10.0)


def _layer(day: Day, model: str, more: str, total: Counted) -> Answer:
    few, many = (profiled_step(day, model, f"{more} --num-layers {layers}") for layers in (2, 3))
    total.calls += many.calls
    total.kernels += many.kernels
    total.filled += many.filled
    figures: dict[str, Any] = {
        "launches_of_a_layer": many.launches - few.launches,
        "fills_of_a_layer": many.fills - few.fills,
        "launches_beside": 3 * few.launches - 2 * many.launches,
        "copies_of_a_step": many.copies,
        "operators_of_a_layer": dict((many.calls - few.calls).most_common(40)),
        "kernels_of_a_layer": dict((many.kernels - few.kernels).most_common(40)),
    }
    if not day.on_gpu:
        return Answer(None, {**figures, "not_to_be_had": "a CPU launches no kernels: operators are counted"})
    return Answer(many.launches > few.launches > 0, figures)


def profiled_step(day: Day, model: str, more: str) -> Counted:
    """Count the third step."""
    config = parsed(flags(day, model, more), model)
    with trainer(config, day.device) as made:
        for _ in range(2):
            made.step()
        day.synchronize()
        with profile(activities=pick(day.device).profiled) as profiler:
            made.step()
            day.synchronize()
    return counted(profiler.events() or ())


def counted(events: Iterable[FunctionEvent]) -> Counted:
    """Count kernels by the operator that launched them, directly or through another operator."""
    found = Counted()
    for event in events:
        on_host = event.device_type.name == "CPU"
        if not on_host:
            moves, fills = event.name.startswith(MOVES), event.name.startswith(FILL)
            found.copies += moves
            found.fills += fills
            found.launches += not moves and not fills and not event.is_user_annotation
        elif event.name.startswith(OPERATOR):
            name = event.name.removeprefix(OPERATOR)
            found.calls[name] += 1
            fills, launched = (launched_by(event, fills=which) for which in (True, False))
            found.kernels[name] += launched
            found.filled[name] += fills
    return found


def launched_by(event: FunctionEvent, *, fills: bool) -> int:
    """Return the kernels, or the fills, of an operator and of the operators that it calls."""
    own = sum(kernel.name.startswith(FILL) == fills for kernel in event.kernels if not kernel.name.startswith(MOVES))
    return own + sum(launched_by(child, fills=fills) for child in event.cpu_children)


def _table(day: Day, total: Counted) -> Answer:
    """Write calls, kernels per call and the table's number for every operator."""
    rows = {}
    for name, calls in sorted(total.calls.items()):
        row = KERNELS.get(name)
        each = total.kernels[name] / calls
        rows[name] = {"calls": calls, "kernels": round(each, 3), "table": kernels_of(name)}
        rows[name]["fills"] = round(total.filled[name] / calls, 3)
        rows[name]["estimated"] = row is not None and row.estimated
    path = day.out / "kernels.json"
    path.write_text(json.dumps({**day.findings.facts, "operators": rows}, indent=1) + "\n", encoding="utf-8")
    listed = {name: row for name, row in rows.items() if name in KERNELS}
    figures = {"operators": len(rows), "file": path.name, "in_the_table": listed}
    if not day.on_gpu:
        return Answer(None, {**figures, "not_to_be_had": "a CPU launches no kernels"})
    other = {name: row for name, row in listed.items() if round(row["kernels"]) != row["table"]}
    return Answer(None, {**figures, "other_than_the_table": other})


def _planned(day: Day, name: str, model: str, more: str) -> Answer:
    """Compare the launch budget with the counted kernels of a layer."""
    line = [sys.executable, "-m", "scripts.tracing.budget", kind(model), "--json", "--world-size", "1"]
    seconds = min(PLAN_SECONDS, max(1.0, day.seconds_left))
    done = subprocess.run(
        [*line, *flags(day, model, f"{more} --device cpu")],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the launch budget ended with status {done.returncode}: {done.stderr[-500:]}")
    counted_here = day.findings.read().get((day.part, name), {}).get("launches_of_a_layer")
    return Answer(None, {"planned": json.loads(done.stdout), "launches_of_a_layer": counted_here})


def profiled(day: Day, made: Trainer) -> dict[str, Any]:
    """Profile steps after warmup. On a CPU, which has no kernels, operators are counted instead.

    Returns:
        Seconds per step without and with the profiler, seconds in which at least one kernel runs, the sum of all
        kernels' seconds, launches per step, and the kernels and the operators (with the shapes of their inputs) with
        the longest total time.
    """
    for _ in range(3):
        made.monitor.add(made.step())
    alone = step_seconds(day, made, STEPS)
    with profile(activities=pick(day.device).profiled, record_shapes=True) as profiler:
        watched = step_seconds(day, made, STEPS)
    every = profiler.events() or ()
    on_device = "CUDA" if day.on_gpu else "CPU"
    events = [event for event in every if event.device_type.name == on_device and not event.is_user_annotation]
    named = ((event.name, event.time_range.elapsed_us()) for event in events)
    return {
        "seconds": alone,
        "profiled_seconds": watched,
        "busy_seconds": busy(events) / STEPS,
        "kernel_seconds": sum(event.time_range.elapsed_us() for event in events) / 1e6 / STEPS,
        "launches": len(events) / STEPS,
        "kernels": longest(named),
        "operators": longest(launches(every)),
    }


def busy(events: Iterable[FunctionEvent]) -> float:
    """Return the seconds in which at least one of the events runs."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 1e6


def launches(events: Iterable[FunctionEvent]) -> Iterator[tuple[str, float]]:
    """Yield the kernels that operators launch, as (name and input shapes of the operator, microseconds)."""
    for event in events:
        if event.device_type.name == "CPU":
            shapes = [shape for shape in event.input_shapes or () if shape]
            for kernel in event.kernels:
                yield f"{event.name.removeprefix(OPERATOR)} {shapes}", kernel.duration


def longest(named: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Return calls and milliseconds per step and the share by name, longest first.

    named: (name, microseconds) of all steps.
    """
    calls, microseconds = Counter[str](), dict[str, float]()
    for name, took in named:
        short = name[:NAME]
        calls[short] += 1
        microseconds[short] = microseconds.get(short, 0.0) + took
    first = sorted(microseconds, key=lambda name: -microseconds[name])[:LONGEST]
    figures = ((name, calls[name] / STEPS, microseconds[name]) for name in first)
    total = sum(microseconds.values()) or 1.0
    return {
        name: {"calls": count, "milliseconds": took / 1e3 / STEPS, "share": took / total}
        for name, count, took in figures
    }
