"""Bits of masters and moments that flip while they are at rest, where no other rank holds the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import SHARDING, Outcome, compared, uninterrupted, verdict

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


def flipped_in_save(folder: Path) -> Outcome:
    """Behind the check before a save, so that the checkpoint has it: the restart goes on from the one before."""
    fault = Fault("flip in a save", 1, 4, name="exp_avg")
    ended = run_job(folder, 2, fault, *SHARDING, "--state-digest-steps", "1", restarts=1)
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    if any(told not in ended.output for told in (TOLD, "iter_0000004.suspect", "resumed at iteration 2")):
        outcome.survived, outcome.note = 0, "the checkpoint was taken: " + ended.output[-2000:]
    return outcome


def weak(folder: Path) -> Outcome:
    """A cell that loses its bit after every step, while a part of three is compared in each: found within a turn."""
    flags = (*SHARDING, "--state-digest-steps", "3", "--train-iters", "12", "--lr-decay-iters", "12")
    ended = run_job(folder, 2, Fault("weak cell", 1, 4, name="exp_avg"), *flags)
    good = ended.status == 1 and TOLD in ended.output and max(ended.losses) <= 7
    return verdict(good, ended)


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for layout, flags in (("sharding 2", SHARDING), ("stage 3", STAGE_3), ("offloaded", OFFLOADED)):
        for name in ("master", "exp_avg", "exp_avg_sq") if flags == SHARDING else ("master", "exp_avg"):
            yield f"bit flip at rest, {name}, {layout}", flipped(name, *flags)
    yield "bit flip between a check and the save that follows", flipped_in_save
    yield "weak memory cell, a part of three in each step", weak
