"""The start of a run from a local checkpoint, this job's own checkpoints, or those of ``--load``.

If a fault ended the previous start, the run resumes from a checkpoint before it, or is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from megapar.arguments import Config
from megapar.checkpoints.format.faults import NEVER, Fault, fault_of, read_fault, suspects
from megapar.checkpoints.format.shards import Verify
from megapar.checkpoints.ownership.scalars import Loaded
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load import state
from megapar.checkpoints.save_load.checkpoints import Checkpoints, ResumeLimit
from megapar.checkpoints.save_load.local import LocalCheckpoint
from megapar.checkpoints.save_load.local_saves import LocalSaves
from megapar.config.run import CheckpointOptions
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.world import World
from megapar.core.optimizer.loss_scale import LossScale
from megapar.errors import UnverifiedError
from megapar.files.location import Location, at, same_place
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress

_ANY = 2**62


def resume(
    config: Config,
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    loss_scale: LossScale | None,
    checkpoints: Checkpoints,
    local_saves: LocalSaves | None,
) -> Loaded | None:
    """Fill weights and optimizer state from the newest sound checkpoint. Returns None if the run starts from scratch.

    Raises CheckpointError.

    Args:
        progress: The progress of a run without a checkpoint.
        schedule: This run's learning-rate schedule.
        loss_scale: The loss scaling of fp16. None without it.
    """
    recovery = FaultRecovery(config.checkpoint, job.world, local_saves, checkpoints)
    limit = recovery.limit_checkpoints()
    checkpoints.notes += recovery.notes
    source = checkpoints.source()
    same_job = source is not None and source.same_job
    local = None if local_saves is None else _find_local(config, checkpoints, local_saves, limit, same_job=same_job)
    if source is None and local is None:
        checkpoints.start_from_scratch()
        checkpoints.set_lineage(None)
        return None
    wanted = _load_options(config, same_job=same_job or local is not None)

    def read(folder: Location) -> Loaded:
        return state.load(folder, job, progress, schedule, wanted, loss_scale)

    if local is not None and local_saves is not None:
        # A newer sound checkpoint on disk takes precedence.
        # --ckpt-step and --finetune go back from what an earlier launch saved there.
        goes_back = not same_job and (config.checkpoint.ckpt_step is not None or config.checkpoint.finetune)
        newer = source is not None and checkpoints.saves_into(source) and not goes_back
        loaded = checkpoints.load_newer(read, source, local.iteration) if source is not None and newer else None
        if loaded is None:
            name = at(f"local checkpoint {local.iteration}")
            checkpoints.resumed_from = name
            checkpoints.notes.append(f"taking the local checkpoint of iteration {local.iteration}")
            loaded = state.restore_scalars(name, local_saves.load(local), job, progress, schedule, wanted, loss_scale)
            checkpoints.set_lineage(loaded, local=True)
            return loaded
    else:
        assert source is not None
        loaded = checkpoints.load(read, source)
    checkpoints.set_lineage(loaded)
    return loaded


def _find_local(
    config: Config, checkpoints: Checkpoints, local_saves: LocalSaves, limit: int | None, *, same_job: bool
) -> LocalCheckpoint | None:
    """Return the newest local checkpoint that may be loaded, of iteration ``limit`` at most, or None.

    ``same_job``: the checkpoints on disk are those of this job.
    """
    options = config.checkpoint
    if not same_job and not checkpoints.is_restart and (options.ckpt_step is not None or options.finetune):
        local_saves.local.remove_after(-1)  # --ckpt-step and --finetune go back from all later checkpoints
        return None
    return local_saves.local.find(limit)


def _load_options(config: Config, *, same_job: bool) -> state.LoadOptions:
    """Return what is loaded of a checkpoint: all of it if this job wrote it, because the job was restarted."""
    options = config.checkpoint
    return state.LoadOptions(
        finetune=options.finetune and not same_job,
        optimizer=same_job or not options.no_load_optim,
        random=same_job or not options.no_load_rng,
        override_schedule=config.optimizer.override_opt_param_scheduler,
        verify=cast(Verify, options.checkpoint_verify),  # one of the flag's choices
    )


class FaultRecovery:
    """Handles the faults that earlier starts recorded. Collective. ``notes`` are lines for the log."""

    def __init__(
        self, options: CheckpointOptions, world: World, local_saves: LocalSaves | None, checkpoints: Checkpoints
    ) -> None:
        self._options = options
        self._world = world
        self._local_saves = local_saves
        self._checkpoints = checkpoints
        self._save = at(options.save) if options.save else None
        self._elsewhere = at(options.load) if options.load else None
        if same_place(options.load, options.save):
            self._elsewhere = None
        self.notes: list[str] = []

    def limit_checkpoints(self) -> int | None:
        """Set aside the checkpoints that may contain a recorded fault, and limit those that the run may resume from.

        Returns the last iteration of a local checkpoint that may be loaded; None without a limit. Raises
        UnverifiedError if no checkpoint is left, and CheckpointError if a folder cannot be read or changed.
        """
        local, start_is_right = self._local_limit()
        fault, other = self._recorded(self._save, self._local_saves), self._recorded(self._elsewhere, None)
        limits = self._checkpoints.limits
        if other is not None and self._elsewhere is not None:  # the run of that folder sets them aside when it resumes
            limits[self._elsewhere.resolve()] = ResumeLimit(other.limit, frozenset(other.others))
            self.notes.append(f"WARNING: {self._elsewhere}: {other}. Only older checkpoints are taken")
        if fault is not None:
            local, start_is_right = min(local, fault.limit), fault.limit >= fault.began
        if local == _ANY:
            return None
        has_local = self._local_saves is not None and self._local_saves.local.find(local) is not None
        suspect: list[str] = []
        remaining = [0] if has_local else []
        if self._save is not None:
            others = frozenset(fault.others if fault is not None else ())
            limits[self._save.resolve()] = ResumeLimit(local, others)
            suspect = self._checkpoints.on_rank_0(lambda: self._set_aside(fault))
            remaining += self._checkpoints.on_rank_0(partial(_kept, self._save, local, others))
        may_restart = start_is_right and (not suspect or bool(self._elsewhere and fault and fault.began > 0))
        if not remaining and not may_restart and self._options.ckpt_step is None:
            raise self._nothing_left(fault, suspect)
        self._add_notes(fault, local, suspect)
        self._forget(fault, local)
        return local

    def _local_limit(self) -> tuple[int, bool]:
        """Return (the lowest limit of the faults that the nodes recorded, True if the start of the run was right)."""
        if self._local_saves is None:
            return _ANY, True
        limit, right = _ANY, 1
        try:
            fault = read_fault(self._local_saves.local.folder)
            if fault is not None:
                limit, right = fault.limit, int(fault.limit >= fault.began)
        except UnverifiedError:  # an unreadable record proves only that there was a fault
            limit, right = NEVER, 0
        limit, right = self._least(limit, right)
        return limit, bool(right)

    def _recorded(self, root: Location | None, local_saves: LocalSaves | None) -> Fault | None:
        """Return the fault that rank 0 finds recorded in a folder, else in its node's memory, else None."""

        def read() -> dict[str, Any] | None:
            for folder in (root, local_saves.local.folder if local_saves else None):
                if folder is None:
                    continue
                try:
                    if (fault := read_fault(folder)) is not None:
                        return fault.to_json()
                except UnverifiedError:
                    # Ignored if the user selects a checkpoint. A record in memory was already handled on all ranks.
                    if folder == root and self._options.ckpt_step is None:
                        raise
            return None

        recorded = self._checkpoints.on_rank_0(read)
        return None if recorded is None else fault_of(recorded)

    def _set_aside(self, fault: Fault | None) -> list[str]:
        """Set aside the suspect checkpoints. Returns their names, including those of an interrupted earlier start."""
        if self._save is None or fault is None:
            return []
        folders.set_aside(self._save, fault.limit, fault.iteration, self._checkpoints.owner, fault.others)
        every = suspects(self._save).items()
        return [path.name for iteration, path in every if fault.limit < iteration <= fault.iteration]

    def _nothing_left(self, fault: Fault | None, suspect: list[str]) -> UnverifiedError:
        removed = f"Set aside: {', '.join(suspect)}. " if suspect else ""
        advice = "Start from scratch, or pass --load and --ckpt-step of a checkpoint that you trust."
        if self._save is not None:
            advice = (
                f"Pass --load {self._save} --ckpt-step N to resume from one anyway, or another --save to start from "
                "scratch."
            )
        reason = f"{fault}. " if fault is not None else "the run before this start found wrong numbers. "
        return UnverifiedError(f"{reason}No checkpoint from before that is left. {removed}{advice}")

    def _add_notes(self, fault: Fault | None, local: int, suspect: list[str]) -> None:
        self.notes.append(f"WARNING: {fault or 'the run before this start found wrong numbers'}")
        if fault is not None:
            self.notes.append(fault.message)
        if suspect:
            why = "set aside, because they may contain the fault (--load with --ckpt-step N still loads one)"
            self.notes.append(f"{why}: {', '.join(suspect)}")
        if self._local_saves is not None:
            self.notes.append(
                f"local checkpoints of iterations after {local} are not taken, because they may contain the fault"
            )

    def _forget(self, fault: Fault | None, local: int) -> None:
        """Remove the records of handled faults, so that they do not affect the next start."""
        if self._local_saves is not None:
            self._local_saves.local.remove_after(local)
            self._least(0)  # a barrier: all ranks have removed their checkpoints before any rank removes its record
            self._local_saves.forget_fault()
        if self._save is not None and fault is not None:
            root, iteration = self._save, fault.iteration
            self._checkpoints.on_rank_0(lambda: folders.file_fault(root, iteration))

    def _least(self, *values: int) -> list[int]:
        """Return the minimum over all ranks of each value."""
        everyone = self._world.axis("world")
        least = torch.tensor(values, dtype=torch.int64, device=self._world.device.torch_device)
        reduce_numbers(least, everyone, "iterations", dist.ReduceOp.MIN)
        return [int(value) for value in least.tolist()]


def _kept(root: Location, last: int, others: Collection[str]) -> list[int]:
    """Return the iterations up to ``last`` that have a checkpoint which is not one of ``others``."""
    every = folders.every_checkpoint(root).items()
    return [i for i, paths in every if i <= last and {path.name for path in paths} - set(others)]
