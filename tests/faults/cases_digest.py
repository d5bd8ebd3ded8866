"""Bits of masters and moments that flip while they are at rest, where no other rank holds the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import SHARDING, Outcome, compared, uninterrupted

STAGE_3 = (*SHARDING, "--sharding-stage", "3")
OFFLOADED = (*SHARDING, "--optimizer-offload")
TOLD = "masters or moments changed between two updates, on rank 1 ("


def flipped(name: str, *flags: str) -> Callable[[Path], Outcome]:
    """Once, behind step 3: it is named before another checkpoint is taken, and the restart's losses are the same."""

    def case(folder: Path) -> Outcome:
        fault = Fault("flip at rest", 1, 3, name=name)
        ended = run_job(folder, 2, fault, *flags, "--state-digest-steps", "1", restarts=1)
        outcome = compared(ended, uninterrupted(2, *flags))
        if (
            TOLD not in ended.output
            or f"{name} of " not in ended.output
            or "resumed at iteration 2" not in ended.output
        ):
            outcome.survived, outcome.note = 0, "it was not named: " + ended.output[-2000:]
        return outcome

    return case


def weak(folder: Path) -> Outcome:
    """A cell that loses its bit after every step, while a part of three is compared in each: found within a turn."""
    flags = (*SHARDING, "--state-digest-steps", "3", "--train-iters", "12", "--lr-decay-iters", "12")
    ended = run_job(folder, 2, Fault("weak cell", 1, 4, name="exp_avg"), *flags)
    good = ended.status == 1 and TOLD in ended.output and max(ended.losses) <= 7
    return Outcome(1, int(good), [0], note="" if good else ended.output[-2500:])


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for layout, flags in (("sharding 2", SHARDING), ("stage 3", STAGE_3), ("offloaded", OFFLOADED)):
        for name in ("master", "exp_avg", "exp_avg_sq") if flags == SHARDING else ("master", "exp_avg"):
            yield f"bit flip at rest, {name}, {layout}", flipped(name, *flags)
    yield "weak memory cell, a part of three in each step", weak
