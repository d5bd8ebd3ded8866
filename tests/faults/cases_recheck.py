"""Devices that multiply wrongly, once or for good; the recompute check finds them and names the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import DP, MP, SHARDING, Outcome, compared, uninterrupted

EVERY_TWO = ("--recompute-check-interval", "2")
STAGE_3 = (*SHARDING, "--sharding-stage", "3")
PP = ("--pp-degree", "2")


def once(named: str, *layout: str) -> Callable[[Path], Outcome]:
    """A wrong product in the second of two runs: the rank is named, and the restart is the undisturbed run."""
    return _case(Fault("wrong product once", 1, 4), f"run again gave other bits: first {named}", 2, *layout)


def always(named: str, world_size: int, *layout: str) -> Callable[[Path], Outcome]:
    """A product that is wrong behind step 3, alike in every run: what two ranks make of one micro-batch tells."""
    return _case(Fault("wrong product always", 1, 3), named, world_size, *layout)


def _case(fault: Fault, named: str, world_size: int, *layout: str) -> Callable[[Path], Outcome]:
    def case(folder: Path) -> Outcome:
        ended = run_job(folder, world_size, fault, *layout, *EVERY_TWO, restarts=1)
        outcome = compared(ended, uninterrupted(world_size, *layout))
        if "iteration 4: " not in ended.output or named not in ended.output:
            outcome.survived, outcome.note = 0, "it was not named: " + ended.output[-2500:]
        return outcome

    return case


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    here = "the output of layers.1 of rank 1 on "
    layouts = (("sharding 2", SHARDING), ("stage 3", STAGE_3), ("dp 2", DP), ("pp 2", PP))
    for name, layout in layouts:
        yield f"wrong product once, {name}", once(here, *layout)
    yield "wrong product once, mp 2", once("the output of layers.1 of rank 0 on ", *MP)  # both have their sum
    yield "wrong product for good, sharding 2", always("At fault is one of rank 0 on ", 2, *SHARDING)
    yield "wrong product for good, sharding 4", always("At fault is rank 1 on ", 4, "--sharding-degree", "4")
