"""Wrong numbers in a rank's memory: what is gone on from, what is set aside, and when a run is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import DP, NONE, SHARDING, Outcome, compared, told, uninterrupted, verdict

# The replica guard is to find it, not the one that compares memory with itself.
LATE = ("--state-digest-steps", "0", "--replica-check-interval", "5")
EVERY_THIRD = ("--state-digest-steps", "0", "--replica-check-interval", "3")


def flip(name: str, iteration: int, *, late: bool = False) -> Fault:
    """A bit of rank 1 after a step. late: the guard runs by its interval only, not before saves."""
    return Fault("flip in memory", 1, iteration, name=name, harm="found late" if late else "")


def named(layout: Sequence[str], name: str, iteration: int) -> Callable[[Path], Outcome]:
    """The guard, whose interval is longer than the saves', runs before the next save, which is not taken."""

    def case(folder: Path) -> Outcome:
        ended = run_job(folder, 2, flip(name, iteration), *layout, *LATE, restarts=1)
        outcome = compared(ended, uninterrupted(2, *layout))
        after = "after iteration 4 the check 'replicas' found wrong numbers: rank 0 on node "
        return told(outcome, ended, "iteration 4: replicas of parameters differ: ", after, "resumed at iteration 2")

    return case


def set_aside(folder: Path) -> Outcome:
    """A check that runs by its interval only: the checkpoint after the flip is set aside, and taken by number still."""
    ended = run_job(folder, 2, flip("master", 4, late=True), *DP, *EVERY_THIRD, restarts=1)
    outcome = compared(ended, uninterrupted(2, *DP))
    told(outcome, ended, "iter_0000004.suspect", "resumed at iteration 2")
    root = folder / "c"
    record = json.loads((root / "corruption-0000006.json").read_text())
    kept = sorted(path.name.removeprefix("iter_000000") for path in root.glob("iter_*"))
    if kept != ["2", "4", "4.suspect", "6"] or record["verified"]["replicas"] != 3:
        outcome.survived, outcome.note = 0, f"{kept} {record}"
    (root / "iter_0000004").rename(folder / "away")
    again = run_job(folder, 2, NONE, *DP, "--ckpt-step", "4", "--save", str(folder / "other"), "--exit-interval", "5")
    return told(outcome, again, f"resumed at iteration 4 from {root / 'iter_0000004.suspect'}")


def longer_than_kept(folder: Path) -> Outcome:
    """The check's interval is longer than all that --keep keeps: it keeps one more."""
    steps = ("--train-iters", "12", "--lr-decay-iters", "12", "--save-interval", "1")
    ended = run_job(folder, 2, flip("master", 7, late=True), *DP, *LATE, *steps, "--keep", "2", restarts=1)
    outcome = compared(ended, uninterrupted(2, *DP, *steps))
    return told(outcome, ended, "iter_0000008.suspect, iter_0000009.suspect", "resumed at iteration 5")


def nothing_left(folder: Path) -> Outcome:
    """All checkpoints are from after the flip: refused, by hand too, until somebody names one."""
    ended = run_job(folder, 2, flip("master", 1, late=True), *DP, *LATE, restarts=1)
    by_hand = run_job(folder, 2, NONE, *DP)
    good = (ended.status, by_hand.status) == (2, 2) and max(ended.losses) < 6 and by_hand.losses == ended.losses
    outcome, aside = verdict(good, ended, by_hand), "iter_0000002.suspect, iter_0000004.suspect"
    told(outcome, ended, f"No checkpoint from before that is left. Set aside: {aside}")
    told(outcome, by_hand, "contains only checkpoints that were set aside")
    chosen = run_job(folder, 2, NONE, *DP, "--ckpt-step", "2", "--exit-interval", "3")
    return told(outcome, chosen, "resumed at iteration 2 from")


def before_any_save(folder: Path) -> Outcome:
    """Nothing had been saved: the run starts again as it did."""
    saves = ("--save-interval", "0", *EVERY_THIRD)
    ended = run_job(folder, 2, flip("parameter", 3), *SHARDING, *saves, restarts=1)
    return told(compared(ended, uninterrupted(2, *SHARDING)), ended, "after iteration 3 the check 'replicas'")


def local(folder: Path) -> Outcome:
    """Local checkpoints of every step: those from after the last check that passed are not taken."""
    flags = (*DP, "--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(folder / "memory"), *EVERY_THIRD)
    ended = run_job(folder, 2, flip("master", 4, late=True), *flags, restarts=1)
    outcome = compared(ended, uninterrupted(2, *DP))
    if "taking the local checkpoint" in ended.output:
        outcome.survived, outcome.note = 0, ended.output[-2000:]
    return told(outcome, ended, "local checkpoints of iterations after 3 are not taken")


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    yield "bit flip in memory, a master, dp 2", named(DP, "master", 3)
    yield "bit flip in memory, a moment, dp 2", named(DP, "moment", 3)
    yield "bit flip in memory, a parameter, sharding 2", named(SHARDING, "parameter", 4)
    yield "bit flip found after a save", set_aside
    yield "bit flip found after more saves than are kept", longer_than_kept
    yield "bit flip found before any save", before_any_save
    yield "bit flip found with nothing verified left", nothing_left
    yield "bit flip found after local checkpoints", local
