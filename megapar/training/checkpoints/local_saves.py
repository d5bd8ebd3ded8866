"""Local checkpoints of a run: taken every few steps in the background, taken back by a restart of the same job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar.arguments import Config
from megapar.config.launched import launch_id
from megapar.config.suspects import RECORD
from megapar.core.checkpoint.background import Background, Section, no_copy, unwatched
from megapar.core.checkpoint.local import FoundLocal, LocalCheckpoints
from megapar.core.checkpoint.local_owner import private_folder
from megapar.core.comm.world import World
from megapar.errors import TrainingError
from megapar.training.building.job import Job
from megapar.training.checkpoints import state

SHARED_MEMORY = Path("/dev/shm")


class LocalSaves:
    """Every rank has one and calls the same in the same step. say: where rank 0 reports."""

    def __init__(self, local: LocalCheckpoints, interval: int, job: Job, section: Section = unwatched) -> None:
        self._local = local
        self._interval = interval
        self._job = job
        self._background = Background(job.world.device, section)
        self.say: Callable[[str], None] | None = None

    def due(self, iteration: int) -> bool:
        """Whether a local checkpoint is to be taken after this step."""
        return iteration % self._interval == 0

    def save(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Take one; the one before is waited for first."""
        self.settle()
        shards = {**state.weights(self._job), **state.moments(self._job)}
        everything = {name: replace(shard, primary=True) for name, shard in shards.items()}
        self._background.begin(
            everything,
            lambda copies: self._local.save(iteration, copies, scalars),
            lambda error: self._local.save(iteration, no_copy(error), scalars),
            f"of iteration {iteration} in memory",
        )

    def before_update(self) -> None:
        """The optimizer is about to change what is being copied."""
        self._background.settle_copy()

    def settle(self) -> None:
        """Wait for the one under way; where this node's memory is full it is told, and training goes on."""
        written = self._background.join()
        if written is None or written.error is None:
            return
        if not isinstance(written.error, OSError):
            raise written.error
        if self.say is not None:
            self.say(f"WARNING: no local checkpoint on the node of rank 0: {written.error}")

    @property
    def folder(self) -> Path:
        """Where this node keeps those of this job."""
        return self._local.folder

    def find(self, limit: int | None = None) -> FoundLocal | None:
        """The newest one that is whole, of no later iteration than the limit."""
        return self._local.find(limit)

    def remove_after(self, iteration: int) -> None:
        """Give up the ones of later iterations, from which another start would go on."""
        self._local.remove_after(iteration)

    def forget_fault(self) -> None:
        """What this node has recorded has been acted on."""
        (self.folder / RECORD).unlink(missing_ok=True)

    def load(self, found: FoundLocal) -> dict[str, Any]:
        """Fill masters and moments; its scalars."""
        return self._local.load(found, {**state.weights(self._job), **state.moments(self._job)})

    def remove(self) -> None:
        """The run has ended well."""
        self.settle()
        self._local.remove()


def make(config: Config, job: Job, job_name: str, section: Section = unwatched) -> LocalSaves | None:
    """As the flags say; None without --local-checkpoint-interval. Raises TrainingError without a launcher's job.

    section: what watches the thread that saves.
    """
    options, world = config.reliability, job.world
    if not options.local_checkpoint_interval:
        return None
    if not job_name:
        raise TrainingError(
            "--local-checkpoint-interval serves restarts of one job: start it by megapar launch --max-restarts N, or "
            "by torchrun with a --rdzv-id of its own"
        )
    root = Path(options.local_checkpoint_dir or SHARED_MEMORY / f"megapar-{os.getuid()}")
    facts = {"model": state.model_facts(job), "grid": state.grid_facts(job)}
    group = world.spare_group("local")
    size = world.grid.world_size
    private_folder(root, mine=not options.local_checkpoint_dir)
    local = LocalCheckpoints(root, job_name, world.rank, size, _neighbour(world), facts, group, launch_id(os.environ))
    world.on_leave.append(local.release)
    return LocalSaves(local, options.local_checkpoint_interval, job, section)


def _neighbour(world: World) -> tuple[int, int] | None:
    """(this rank's counterpart on the next node, the one on the node before); None where there is one node."""
    size = world.grid.world_size
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if per_node >= size:
        return None
    here = world.launched[world.rank]
    return world.launched.index((here + per_node) % size), world.launched.index((here - per_node) % size)
