"""Numbers that change at rest or come out wrong, where no other rank has the same: found, and the rank is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import DP, MP, SHARDING, Outcome, compared, told, uninterrupted, verdict

STAGE_3 = (*SHARDING, "--sharding-stage", "3")
EVERY_TWO = ("--recompute-check-interval", "2")
PP = ("--pp-degree", "2")
OFFLOADED = (*SHARDING, "--optimizer-offload")
TOLD = "masters or moments changed between two updates, on rank 1 ("


def flipped(name: str, *flags: str) -> Callable[[Path], Outcome]:
    """Once, behind step 3: it is named before another checkpoint is taken, and the restart's losses are the same."""

    def case(folder: Path) -> Outcome:
        fault = Fault("flip at rest", 1, 3, name=name)
        ended = run_job(folder, 2, fault, *flags, "--state-digest-steps", "1", restarts=1)
        outcome = compared(ended, uninterrupted(2, *flags))
        return told(outcome, ended, TOLD, f"{name} of ", "resumed at iteration 2")

    return case


def flipped_in_save(folder: Path) -> Outcome:
    """Behind the check before a save, so that the checkpoint has it: the restart goes on from the one before."""
    fault = Fault("flip in a save", 1, 4, name="exp_avg")
    ended = run_job(folder, 2, fault, *SHARDING, "--state-digest-steps", "1", restarts=1)
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    return told(outcome, ended, TOLD, "iter_0000004.suspect", "resumed at iteration 2")


def weak(folder: Path) -> Outcome:
    """A cell that loses its bit after every step, while a part of three is compared in each: found within a turn."""
    flags = (*SHARDING, "--state-digest-steps", "3", "--train-iters", "12", "--lr-decay-iters", "12")
    ended = run_job(folder, 2, Fault("weak cell", 1, 4, name="exp_avg"), *flags)
    good = ended.status == 1 and TOLD in ended.output and max(ended.losses) <= 7
    return verdict(good, ended)


def once(named: str, *layout: str) -> Callable[[Path], Outcome]:
    """A wrong product in the second of two runs: the rank is named, and the restart is the undisturbed run."""
    return _case(Fault("wrong product once", 1, 4), f"run again gave other bits: first {named}", 2, *layout)


def always(named: str, world_size: int, *layout: str) -> Callable[[Path], Outcome]:
    """A product that is wrong behind step 3, alike in every run: what two ranks make of one micro-batch tells."""
    return _case(Fault("wrong product always", 1, 3), named, world_size, *layout)


def _case(fault: Fault, named: str, world_size: int, *layout: str) -> Callable[[Path], Outcome]:
    def case(folder: Path) -> Outcome:
        ended = run_job(folder, world_size, fault, *layout, *EVERY_TWO, restarts=1)
        return told(compared(ended, uninterrupted(world_size, *layout)), ended, "iteration 4: ", named)

    return case


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for layout, flags in (("sharding 2", SHARDING), ("stage 3", STAGE_3), ("offloaded", OFFLOADED)):
        for name in ("master", "exp_avg", "exp_avg_sq") if flags == SHARDING else ("master", "exp_avg"):
            yield f"bit flip at rest, {name}, {layout}", flipped(name, *flags)
    yield "bit flip between a check and the save that follows", flipped_in_save
    yield "weak memory cell, a part of three in each step", weak
    here = "the output of layers.1 of rank 1 on "
    layouts = (("sharding 2", SHARDING), ("stage 3", STAGE_3), ("dp 2", DP), ("pp 2", PP))
    for name, layout in layouts:
        yield f"wrong product once, {name}", once(here, *layout)
    yield "wrong product once, mp 2", once("the output of layers.1 of rank 0 on ", *MP)  # both have their sum
    yield "wrong product for good, sharding 2", always("At fault is one of rank 0 on ", 2, *SHARDING)
    yield "wrong product for good, sharding 4", always("At fault is rank 1 on ", 4, "--sharding-degree", "4")
