"""Memory that does not keep what is written, and products of a linear layer that come out wrong, once or for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapar.checkpoints.save_load.checkpoints import Checkpoints
from megapar.health.corruption.recompute_guard import RecomputeGuard
from megapar.trainer import Trainer
from megapar.training.step.job import Job
from tests.faults.striking import SPEC, after_step, before, note

WRONG = 1.5  # times one element
MODULE = "layers.1.attention.qkv"


def flip_at_rest(always: bool) -> None:
    """One bit of this rank's state is another one after the step. name: ``master`` or of a moment. always: after all
    later ones, too, as where a cell does not hold its charge.
    """
    struck: list[int] = []

    def due(trainer: Trainer) -> None:
        at = trainer.progress.iteration
        if at == SPEC["iteration"] or (always and at > SPEC["iteration"]):
            if not struck:
                note()
                struck.append(at)
            flip(trainer.job)

    after_step(due)


def flip_in_save() -> None:
    """The same once, when the checks before a save have passed and its copy has not begun."""

    def due(checkpoints: Checkpoints, at: int, *_: Any, **__: Any) -> bool:
        if at == SPEC["iteration"]:
            note()
            flip(checkpoints._job)
        return False

    before(Checkpoints, "save", due)


def flip(job: Job) -> None:
    """One bit in the middle of what this rank holds."""
    master = SPEC["name"] == "master"
    shards = [shard.master for shard in job.sharding.master_shards]
    tensors = shards if master else job.optimizer.state(SPEC["name"])
    with torch.no_grad():
        tensors[len(tensors) // 2].view(-1)[:1].view(torch.int32)[1:] ^= 1 << 12  # fp64: of the upper half


def spoil(due: Callable[[Trainer], bool]) -> None:
    """One element of the layer's product is another one while it is due."""

    def register(trainer: Trainer) -> bool:
        def hook(module: object, inputs: object, output: Tensor) -> Tensor:
            if not due(trainer):
                return output
            factor = output.new_ones(output.numel())
            factor[-1] = WRONG  # a value: the first position asks for nobody but itself, whatever its query
            return output * factor.view_as(output)

        dict(trainer.job.model.named_modules())[MODULE].register_forward_hook(hook)
        return False

    before(Trainer, "train", register)


def product_always() -> None:
    """Behind the step, in every run of a micro-batch: the same wrong number each time."""
    struck = [False]

    def due(trainer: Trainer) -> bool:
        begun = bool(trainer.progress.iteration >= SPEC["iteration"])
        if begun and not struck[0]:
            note()
            struck[0] = True
        return begun

    spoil(due)


def product_once() -> None:
    """Once, while a micro-batch is run a second time after the step."""
    runs = [0]

    def count(_: RecomputeGuard, work: Any) -> bool:
        if work.iteration == SPEC["iteration"]:
            runs[0] += 1
            if runs[0] == 2:
                note()
        return False

    spoil(lambda trainer: runs[0] == 2 and trainer.progress.iteration == SPEC["iteration"])
    before(RecomputeGuard, "_run", count)
