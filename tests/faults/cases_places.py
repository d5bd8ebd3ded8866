"""Kills around a move of experts: what a run resumes with is of one placement, on disk and in local checkpoints.

step            3        4                      5
experts      chosen    move, in order: save    back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Fault, run_job
from tests.faults.outcome import Outcome, compared, told, uninterrupted

EXPERTS = ("--ep-degree", "2", "--num-experts", "8", "--moe-rebalance-interval", "3")
SHARED = (*EXPERTS, "--sharding-degree", "4")  # each of two shards has half of a rank's experts


def killed(fault: Fault, *layout: str, world_size: int = 2, local: bool = False) -> Callable[[Path], Outcome]:
    """A rank dies once, and all start again with the losses of a run that is left alone.

    local: with local checkpoints of every step, and none on disk. That of the last step is still being written when a
    rank dies in the next one, so the run mostly goes on from the one before it.
    """

    def case(folder: Path) -> Outcome:
        flags = layout or EXPERTS
        wanted = uninterrupted(world_size, *flags)
        if local:
            flags = (*flags, "--save-interval", "0", "--local-checkpoint-interval", "1")
            flags = (*flags, "--local-checkpoint-dir", str(folder / "memory"))
        else:
            flags = (*flags, "--no-async-save")  # complete when the next step begins
        ended = run_job(folder, world_size, fault, *flags, restarts=1)
        outcome = compared(ended, wanted)
        if not ended.strikes or "move with the next update" not in ended.output.partition("restarting")[0]:
            outcome.survived, outcome.note = 0, "nothing moved, or nothing struck: " + ended.output[-2000:]
        return told(outcome, ended, *(["taking the local checkpoint"] if local else []))

    return case


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    kind = "kill -9 between choosing and moving experts"
    yield f"{kind}, checkpoints on disk", killed(Fault("kill in step", 1, 4))
    yield f"{kind}, local ones", killed(Fault("kill in step", 1, 5), local=True)
    kind = "kill -9 in a move of experts"
    yield f"{kind}, in the step", killed(Fault("kill in move", 1, 4))
    yield f"{kind}, in the step, sharding 4", killed(Fault("kill in move", 3, 4), *SHARED, world_size=4)
    yield f"{kind}, in the return before a save", killed(Fault("kill in move", 0, 5))
    yield f"{kind}, back after it", killed(Fault("kill in move", 1, 5, seed=2))  # two parameters had returned
    kind = "kill -9 between a save and moving experts back"
    yield f"{kind}, in the next step", killed(Fault("kill in step", 1, 5))
    yield f"{kind}, while it writes", killed(Fault("kill in shard", 1, 4))
    yield f"{kind}, away in local checkpoints", killed(Fault("kill in step", 1, 6), local=True)
