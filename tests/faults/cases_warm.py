"""Ranks that are forked from a process that has imported torch, and launchers whose clocks differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_apart, run_job
from tests.faults.outcome import SHARDING, Outcome, compared, uninterrupted


def starts_again(fault: Fault, *launcher: str, said: str = "") -> Callable[[Path], Outcome]:
    """A rank is killed and all start again; the launcher says so in one line, and no traceback beside it."""

    def case(folder: Path) -> Outcome:
        ended = run_job(folder, 2, fault, *SHARDING, restarts=1, launcher=launcher)
        outcome = compared(ended, uninterrupted(2, *SHARDING))
        told = "megapar launch: rank 1 was killed (signal 9); restarting, 1 of 1\n" in ended.output
        if not told or said not in ended.output or "Traceback" in ended.output:
            return Outcome(1, 0, note=ended.output[-3000:])
        return outcome

    return case


def clocks_apart(nnodes: str, seconds: int) -> Callable[[Path], Outcome]:
    """Two nodes go through the whole run together."""

    def case(folder: Path) -> Outcome:
        ended = run_apart(folder, nnodes, seconds, *SHARDING)
        outcome = compared(ended, uninterrupted(2, *SHARDING))
        together = ended.output.count("= 2 ranks;") == 1 and not re.search("fewer|of 2 ranks are present", ended.output)
        if not together:
            return Outcome(1, 0, note=ended.output[-3000:])
        outcome.lost_steps = [0]
        return outcome

    return case


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    killed = Fault("kill in step", 1, 4)
    yield "a rank is killed, forked from a warm process", starts_again(killed)
    yield "a rank is killed, started one by one", starts_again(killed, "--no-warm-start")
    another = "the process that forks ranks was killed (signal 9); starting a new one"
    yield "a rank and the process that forks ranks are killed", starts_again(Fault("kill warm", 1, 4), said=another)
    for seconds in (-60, 60):
        yield f"clocks of nodes apart, {seconds} s", clocks_apart("2", seconds)
        yield f"clocks of nodes apart, {seconds} s and fewer nodes allowed", clocks_apart("1:2", seconds)
