"""Local checkpoints of a run: saved every few steps in the background, and loaded by a restart of the same job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar.arguments import Config
from megapar.checkpoints.format.faults import RECORD
from megapar.checkpoints.save_load import state
from megapar.checkpoints.save_load.background import Background, Section, unwatched
from megapar.checkpoints.save_load.local import LocalCheckpoint, LocalCheckpoints
from megapar.core.comm import json_messages
from megapar.core.comm.world import World
from megapar.errors import TrainingError
from megapar.launch_environment import equal_nodes, launch_id
from megapar.training.step.job import Job

SHARED_MEMORY = Path("/dev/shm")


class LocalSaves:
    """Saves and loads local checkpoints, in the memory of the nodes. Every rank makes the same calls in the same step.

    Attributes:
        local: The checkpoints of this rank.
        log_line: Writes a line to the log, on rank 0. None before the log is open.
    """

    def __init__(self, local: LocalCheckpoints, interval: int, job: Job, section: Section = unwatched) -> None:
        self.local = local
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
        everything = {name: replace(shard, primary=True) for name, shard in state.shards(self._job).items()}
        detail = f"of iteration {iteration} in memory"
        self._background.begin(everything, lambda copies: self.local.save(iteration, copies, scalars), detail)

    def before_update(self) -> None:
        """Wait until a save has copied the state that the optimizer is about to change."""
        self._background.wait_for_copy()

    def join_save(self) -> None:
        """Wait for the save in progress. If a node has no room for it or for a copy, log a warning and train on."""
        written = self._background.join()
        if written is None or written.error is None:
            return
        if not isinstance(written.error, OSError):
            raise written.error
        if self.log_line is not None:
            self.log_line(f"WARNING: local checkpoint: {written.error}")

    def forget_fault(self) -> None:
        """Remove this node's record of a fault, after it was handled."""
        (self.local.folder / RECORD).unlink(missing_ok=True)

    def load(self, checkpoint: LocalCheckpoint) -> dict[str, Any]:
        """Fill master weights and optimizer state from a local checkpoint. Returns its scalars."""
        with state.filled_shards(self._job) as shards:
            return self.local.load(checkpoint, shards)

    def remove(self) -> None:
        """Remove all local checkpoints, after a complete run."""
        self.join_save()
        self.local.remove()


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
    facts = {"model": job.sizes.facts(), "grid": state.grid_facts(job), "states": state.state_dtypes(job)}
    group = world.spare_group("local")
    size = world.grid.world_size
    own = equal_nodes(os.environ) or 0
    node = [own, os.environ.get("LOCAL_WORLD_SIZE") or ""]
    equal = group is None or all(other == node for other in json_messages.all_gather(node, group))
    pair = _neighbour(world, own if equal else 0)  # nodes of several sizes have no pairs
    launch, private = launch_id(os.environ), not options.local_checkpoint_dir
    try:
        local = LocalCheckpoints(root, job_name, world.rank, size, pair, facts, group, launch, private)
    except OSError as error:
        fix = "Point --local-checkpoint-dir at a folder in each node's memory that can be written"
        return None, f"WARNING: no local checkpoints: {error}. {fix}"
    world.on_leave.append(local.release)
    alone = "" if equal else "WARNING: local checkpoints have no copies, because nodes differ in ranks"
    return LocalSaves(local, options.local_checkpoint_interval, job, section), alone


def _neighbour(world: World, per_node: int) -> tuple[int, int] | None:
    """Return the ranks in this rank's place on (the next node, the previous node), None on one node or unequal ones."""
    size = world.grid.world_size
    if not 0 < per_node < size:
        return None
    position = world.launched[world.rank]
    return world.launched.index((position + per_node) % size), world.launched.index((position - per_node) % size)
