"""Checkpoints that are not what they should be where another way to go on is at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import NONE, Outcome, compared, told, uninterrupted


def damaged_above_local(folder: Path) -> Outcome:
    """The newest checkpoint on disk is damaged: the local one goes first, not the older one on disk."""
    flags = ("--local-checkpoint-interval", "3", "--local-checkpoint-dir", str(folder / "memory"))
    ended = run_job(folder, 1, Fault("damage disk", 0, 5, name=str(folder / "c")), *flags, restarts=1)
    return told(compared(ended, uninterrupted(1)), ended, "taking the local checkpoint of iteration 3", "WARNING")


def special(folder: Path) -> Outcome:
    """The newest checkpoint's layout is a pipe, which nobody waits for: the one before it is taken."""
    want = uninterrupted(1)
    run_job(folder, 1, NONE)
    layout = folder / "c" / "iter_0000006" / "layout.json"
    layout.unlink()
    os.mkfifo(layout)
    ended = run_job(folder, 1, NONE)
    outcome = compared(ended, want)
    outcome.lost_steps = [2]
    return told(outcome, ended, "WARNING", "resumed at iteration 4")


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    yield "newest checkpoint damaged and a sound local one", damaged_above_local
    yield "special file in a checkpoint, pipe for layout.json", special
