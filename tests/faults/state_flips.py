"""Memory that does not keep what is written: bits of masters and moments that flip behind a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megapar.checkpoints.save_load.checkpoints import Checkpoints
from megapar.trainer import Trainer
from megapar.training.step.job import Job


def at_rest(name: str, iteration: int, note: Callable[[], None], *, always: bool = False) -> None:
    """One bit of this rank's state is another one after the step. name: ``master`` or of a moment. always: after all
    later ones, too, as where a cell does not hold its charge.
    """
    kept, struck = Trainer.step, list[int]()

    def step(self: Trainer) -> Any:
        done, at = kept(self), self.progress.iteration
        if at == iteration or (always and at > iteration):
            if not struck:
                note()
                struck.append(at)
            flip(self.job, name)
        return done

    Trainer.step = step  # type: ignore[method-assign]


def in_save(name: str, iteration: int, note: Callable[[], None]) -> None:
    """The same once, when the checks before a save have passed and its copy has not begun."""
    kept = Checkpoints.save

    def save(self: Checkpoints, at: int, *arguments: Any, **options: Any) -> None:
        if at == iteration:
            note()
            flip(self._job, name)
        kept(self, at, *arguments, **options)

    Checkpoints.save = save  # type: ignore[method-assign]


def flip(job: Job, name: str) -> None:
    """One bit in the middle of what this rank holds."""
    tensors = [shard.master for shard in job.sharding.master_shards] if name == "master" else job.optimizer.state(name)
    with torch.no_grad():
        tensors[len(tensors) // 2].view(-1)[:1].view(torch.int32)[1:] ^= 1 << 12  # fp64: of the upper half
