"""Recovery from a fault that ended the previous start: resume from a checkpoint before it, or refuse to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megapar.config.run import CheckpointOptions
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint.owner import Owner
from megapar.core.checkpoint.suspects import put_away, set_aside
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.world import World
from megapar.errors import CheckpointError, UnverifiedError
from megapar.files.location import Location, at
from megapar.files.suspects import NEVER, Fault, fault_of, read_fault, suspects
from megapar.training.checkpoints.local_saves import LocalSaves

_ANY = 2**62
Agree = Callable[[Any], Any]
"""A function that returns rank 0's value on every rank."""


@dataclass(frozen=True)
class ResumeLimit:
    """The checkpoints of a folder that a run may resume from.

    Attributes:
        iteration: Last iteration.
        others: Names of checkpoints on other lineages than that of the fault.
    """

    iteration: int
    others: frozenset[str] = frozenset()

    def allows(self, folder: Location) -> bool:
        """Return True if a checkpoint is from before the fault or on another lineage."""
        return folder.name in self.others or folders.iteration_of(folder) <= self.iteration


@dataclass(frozen=True)
class ResumeLimits:
    """The checkpoints that a run may resume from.

    Attributes:
        by_root: Folder of checkpoints -> its limit.
        local: Last iteration of a local checkpoint. None without a limit.
    """

    by_root: dict[Location, ResumeLimit]
    local: int | None = None


class Aftermath:
    """Handles the faults that earlier starts recorded. Every rank calls ``clear_up`` once.

    Attributes:
        notes: Lines for the log.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        world: World,
        local_saves: LocalSaves | None,
        agree: Agree,
        owner: Owner | None,
    ) -> None:
        self._options = options
        self._world = world
        self._local_saves = local_saves
        self._agree = agree
        self._owner = owner
        self._save = at(options.save) if options.save else None
        self._elsewhere = at(options.load) if options.load else None
        if self._elsewhere == self._save:
            self._elsewhere = None
        self.notes: list[str] = []

    def clear_up(self) -> ResumeLimits:
        """Set aside the checkpoints that may contain a recorded fault. Returns the limits for resuming.

        Raises UnverifiedError if no checkpoint is left, and CheckpointError if a folder cannot be read or changed.
        """
        local, start_is_right = self._local_limit()
        fault, other = self._recorded(self._save, self._local_saves), self._recorded(self._elsewhere, None)
        limits: dict[Location, ResumeLimit] = {}
        if other is not None and self._elsewhere is not None:  # the run of that folder sets them aside when it resumes
            limits[self._elsewhere] = ResumeLimit(other.limit, frozenset(other.others))
            self.notes.append(f"WARNING: {self._elsewhere}: {other}. Only older checkpoints are taken")
        if fault is not None:
            local, start_is_right = min(local, fault.limit), fault.limit >= fault.began
        if local == _ANY:
            return ResumeLimits(limits)
        has_local = self._local_saves is not None and self._local_saves.find(local) is not None
        aside: list[str] = []
        left = [0] if has_local else []
        if self._save is not None:
            others = frozenset(fault.others if fault is not None else ())
            limits[self._save] = ResumeLimit(local, others)
            aside = self._on_rank_0(lambda: self._set_aside(fault))
            every = folders.every_checkpoint(self._save).items()
            left += self._agree([i for i, paths in every if i <= local and {path.name for path in paths} - others])
        may_restart = start_is_right and (not aside or bool(self._elsewhere and fault and fault.began > 0))
        if not left and not may_restart and self._options.ckpt_step is None:
            raise self._nothing_left(fault, aside)
        self._add_notes(fault, local, aside)
        self._forget(fault, local)
        return ResumeLimits(limits, local)

    def _local_limit(self) -> tuple[int, bool]:
        """Return (the lowest limit of the faults that the nodes recorded, True if the start of the run was right)."""
        if self._local_saves is None:
            return _ANY, True
        limit, right = _ANY, 1
        try:
            fault = read_fault(self._local_saves.folder)
            if fault is not None:
                limit, right = fault.limit, int(fault.limit >= fault.began)
        except UnverifiedError:  # an unreadable record proves only that there was a fault
            limit, right = NEVER, 0
        limit, right = self._least(limit, right)
        return limit, bool(right)

    def _recorded(self, root: Location | None, local_saves: LocalSaves | None) -> Fault | None:
        """Return the fault that rank 0 finds recorded in a folder, else in its node's memory, else None."""

        def read() -> dict[str, Any] | None:
            fault = None
            for place in (root, local_saves.folder if local_saves else None):
                try:
                    fault = fault or (None if place is None else read_fault(place))
                except UnverifiedError:
                    # Ignored if the user selects a checkpoint. A record in memory was already handled on all ranks.
                    if place == root and self._options.ckpt_step is None:
                        raise
            return None if fault is None else fault.to_json()

        recorded = self._on_rank_0(read)
        return None if recorded is None else fault_of(recorded)

    def _set_aside(self, fault: Fault | None) -> list[str]:
        """Set aside the suspect checkpoints. Returns their names, including those of an interrupted earlier start."""
        if self._save is None or fault is None:
            return []
        set_aside(self._save, fault.limit, fault.iteration, self._owner, fault.others)
        every = suspects(self._save).items()
        return [path.name for iteration, path in every if fault.limit < iteration <= fault.iteration]

    def _nothing_left(self, fault: Fault | None, aside: list[str]) -> UnverifiedError:
        held = f"Set aside: {', '.join(aside)}. " if aside else ""
        advice = "Start from scratch, or pass --load and --ckpt-step of a checkpoint that you trust."
        if self._save is not None:
            advice = (
                f"Pass --load {self._save} --ckpt-step N to resume from one anyway, or another --save to start from "
                "scratch."
            )
        reason = f"{fault}. " if fault is not None else "the run before this start found wrong numbers. "
        return UnverifiedError(f"{reason}No checkpoint from before that is left. {held}{advice}")

    def _add_notes(self, fault: Fault | None, local: int, aside: list[str]) -> None:
        self.notes.append(f"WARNING: {fault or 'the run before this start found wrong numbers'}")
        if fault is not None:
            self.notes.append(fault.message)
        if aside:
            why = "set aside, because they may contain the fault (--load with --ckpt-step N still loads one)"
            self.notes.append(f"{why}: {', '.join(aside)}")
        if self._local_saves is not None:
            self.notes.append(
                f"local checkpoints of iterations after {local} are not taken, because they may contain the fault"
            )

    def _forget(self, fault: Fault | None, local: int) -> None:
        """Remove the records of handled faults, so that they do not affect the next start."""
        if self._local_saves is not None:
            self._local_saves.remove_after(local)
            self._least(0)  # a barrier: all ranks have removed their checkpoints before any rank removes its record
            self._local_saves.forget_fault()
        if self._save is not None and fault is not None:
            root, iteration = self._save, fault.iteration
            self._on_rank_0(lambda: put_away(root, iteration))

    def _on_rank_0(self, call: Callable[[], Any]) -> Any:
        """Call a function on rank 0. Returns its result, or raises its error, on every rank."""
        answer: list[Any] = [None, "", False]
        if self._world.rank == 0:
            try:
                answer[0] = call()
            except CheckpointError as error:
                answer = [None, str(error), isinstance(error, UnverifiedError)]
        value, problem, unverified = self._agree(answer)
        if problem:
            raise UnverifiedError(problem) if unverified else CheckpointError(problem)
        return value

    def _least(self, *values: int) -> list[int]:
        """Return the minimum over all ranks of each value."""
        everyone = self._world.axis("world")
        least = torch.tensor(values, dtype=torch.int64, device=self._world.device.torch_device)
        reduce_numbers(least, everyone, "iterations", dist.ReduceOp.MIN)
        return [int(value) for value in least.tolist()]
