"""Profile of a training step: its longest kernels and operators, and the time without a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from megapar.core.device.pick import pick
from megapar.trainer import Trainer
from scripts.gpu_day.day import Day
from scripts.gpu_day.kernels import OPERATOR
from scripts.gpu_day.trainers import step_seconds

STEPS, LONGEST, NAME = 2, 40, 110


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
