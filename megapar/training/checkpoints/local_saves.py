"""Local checkpoints of a run: saved every few steps in the background, and loaded by a restart of the same job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar.arguments import Config
from megapar.core.checkpoint.background import Background, Section, no_copy, unwatched
from megapar.core.checkpoint.local import FoundLocal, LocalCheckpoints
from megapar.core.comm.world import World
from megapar.errors import TrainingError
from megapar.files.suspects import RECORD
from megapar.launch_environment import launch_id
from megapar.training.checkpoints import state
from megapar.training.step.job import Job

SHARED_MEMORY = Path("/dev/shm")


class LocalSaves:
    """Saves and loads local checkpoints, in the memory of the nodes. Every rank makes the same calls in the same step.

    Attributes:
        log_line: Writes a line to the log, on rank 0. None before the log is open.
    """

    def __init__(self, local: LocalCheckpoints, interval: int, job: Job, section: Section = unwatched) -> None:
        self._local = local
        self._interval = interval
        self._job = job
        self._background = Background(job.world.device, section)
        self.log_line: Callable[[str], None] | None = None

    def due(self, iteration: int) -> bool:
        """Return True if a local checkpoint is due after this step."""
        return iteration % self._interval == 0

    def save(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Start a save in the background, after waiting for the previous one."""
        self.join_save()
        shards = {**state.weights(self._job), **state.optimizer_states(self._job)}
        everything = {name: replace(shard, primary=True) for name, shard in shards.items()}
        self._background.begin(
            everything,
            lambda copies: self._local.save(iteration, copies, scalars),
            lambda error: self._local.save(iteration, no_copy(error), scalars),
            f"of iteration {iteration} in memory",
        )

    def before_update(self) -> None:
        """Wait until a save has copied the state that the optimizer is about to change."""
        self._background.wait_for_copy()

    def join_save(self) -> None:
        """Wait for the save in progress. If this node's memory is full, log a warning and continue training."""
        written = self._background.join()
        if written is None or written.error is None:
            return
        if not isinstance(written.error, OSError):
            raise written.error
        if self.log_line is not None:
            self.log_line(f"WARNING: no local checkpoint on the node of rank 0: {written.error}")

    @property
    def folder(self) -> Path:
        """Folder of this job's local checkpoints on this node."""
        return self._local.folder

    def find(self, limit: int | None = None) -> FoundLocal | None:
        """Return the newest complete local checkpoint, of iteration ``limit`` at most, or None."""
        return self._local.find(limit)

    def remove_after(self, iteration: int) -> None:
        """Remove the local checkpoints of later iterations, so that no other start resumes from them."""
        self._local.remove_after(iteration)

    def forget_fault(self) -> None:
        """Remove this node's record of a fault, after it was handled."""
        (self.folder / RECORD).unlink(missing_ok=True)

    def load(self, found: FoundLocal) -> dict[str, Any]:
        """Fill master weights and optimizer state from a local checkpoint. Returns its scalars."""
        return self._local.load(found, {**state.weights(self._job), **state.optimizer_states(self._job)})

    def remove(self) -> None:
        """Remove all local checkpoints, after a complete run."""
        self.join_save()
        self._local.remove()


def make(config: Config, job: Job, job_name: str, section: Section = unwatched) -> tuple[LocalSaves | None, str]:
    """Return the local checkpoints of the flags, and a line for the log.

    There are none without --local-checkpoint-interval, or if the memory of a node cannot be written, which the line
    says. ``section`` watches the thread that saves. Raises TrainingError if no launcher has named the job.
    """
    options, world = config.reliability, job.world
    if not options.local_checkpoint_interval:
        return None, ""
    if not job_name:
        raise TrainingError(
            "--local-checkpoint-interval serves restarts of one job: start it with megapar launch --max-restarts N, or "
            "with torchrun and a unique --rdzv-id"
        )
    root = Path(options.local_checkpoint_dir or SHARED_MEMORY / f"megapar-{os.getuid()}")
    facts = {"model": state.model_facts(job), "grid": state.grid_facts(job)}
    group = world.spare_group("local")
    size = world.grid.world_size
    launch, private = launch_id(os.environ), not options.local_checkpoint_dir
    try:
        local = LocalCheckpoints(root, job_name, world.rank, size, _neighbour(world), facts, group, launch, private)
    except OSError as error:
        fix = "Point --local-checkpoint-dir at a folder in each node's memory that can be written"
        return None, f"WARNING: no local checkpoints: {error}. {fix}"
    world.on_leave.append(local.release)
    return LocalSaves(local, options.local_checkpoint_interval, job, section), ""


def _neighbour(world: World) -> tuple[int, int] | None:
    """Return the ranks with this rank's position on (the next node, the previous node), or None on a single node."""
    size = world.grid.world_size
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if per_node >= size:
        return None
    here = world.launched[world.rank]
    return world.launched.index((here + per_node) % size), world.launched.index((here - per_node) % size)
