"""Faults that leave a process running with what is wrong: in memory, on disk, in what it calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapar import trainer
from megapar.checkpoints.save_load import folder, storage
from megapar.errors import CheckpointError
from megapar.health.corruption.guards import ReplicaGuard
from megapar.trainer import Trainer
from megapar.training.step.batches import BatchFeed
from tests.faults.striking import RANK, SPEC, STEPS, after_step, before, note


def not_a_number(always: bool) -> None:
    """A module of this rank gives NaN: once in the step, or in every step from there on."""

    def register(trainer: Trainer) -> bool:
        struck: list[int] = []

        def hook(module: object, inputs: object, output: Any) -> Any:
            due = trainer.progress.iteration + 1 >= SPEC["iteration"] and (always or not struck)
            if not due:
                return output
            if not struck:
                note()
                struck.append(1)
            return output * torch.nan

        dict(trainer.job.model.named_modules())["layers.1.mlp_norm"].register_forward_hook(hook)
        return False

    before(Trainer, "train", register)


def diverge() -> None:
    """One bit of a parameter of this rank is another one after the step."""

    def due(trainer: Trainer) -> None:
        if trainer.progress.iteration == SPEC["iteration"]:
            note()
            trainer.job.sharding.wait()
            with torch.no_grad():
                dict(trainer.job.model.named_parameters())["final_norm.weight"][0] *= 1 + 1e-12

    after_step(due)


def flip_in_memory() -> None:
    """One bit of what this rank holds of a parameter is another one after the step. name: master, moment, parameter."""

    def due(trainer: Trainer) -> None:
        if trainer.progress.iteration != SPEC["iteration"]:
            return
        trainer.job.sharding.wait()  # on every rank: it may begin what others take part in
        if SPEC["rank"] != RANK:
            return
        note()
        views, masters = trainer.job.sharding.views, [shard.master for shard in trainer.job.sharding.master_shards]
        tensors: dict[str, Callable[[], list[torch.Tensor]]] = {
            "master": lambda: [view.tensor for view in views(masters)],
            "moment": lambda: [view.tensor for view in views(trainer.job.optimizer.state("exp_avg"))],
            "parameter": lambda: list(trainer.job.model.parameters()),
        }
        whole = next(tensor for tensor in tensors[SPEC["name"]]() if tensor.numel())
        whole.detach().view(-1)[:1].view(torch.int64).bitwise_xor_(1 << 44)

    after_step(due)


def by_interval_only() -> None:
    """The replica guard, on every rank, as a check that costs too much to run before saves."""
    ReplicaGuard.before_saves = False


def damage(local: bool) -> None:
    """Kill this rank in the step, with the newest checkpoint damaged: its local one, or a shard on disk."""

    def due(trainer: Trainer, *_: Any) -> bool:
        if trainer.progress.iteration + 1 == SPEC["iteration"]:
            saves = trainer.local_saves
            trainer.checkpoints.join_save()
            if saves is not None:
                saves.join_save()
            if local:
                assert saves is not None
                path = max(saves.local._iterations().items())[1] / f"rank-{RANK:05d}.{SPEC['name']}"
            else:
                path = next(max(Path(SPEC["name"]).glob("iter_*")).glob("shard-*"))
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 16
            path.write_bytes(content[: len(content) // 2] if SPEC["harm"] == "truncation" else content)
            return True
        return False

    before(Trainer, "step", due)


def no_space_check() -> None:
    """The disk is full before anybody has looked."""
    storage._check_space = lambda *_: None


def fail_in_step(error: Exception) -> None:
    """An exception in the step, on this rank."""

    def due(_: BatchFeed, loader: Any, progress: Any) -> bool:
        if progress.iteration + 1 == SPEC["iteration"]:
            note()
            raise error
        return False

    before(BatchFeed, "next", due)


def fail_publications() -> None:
    """No checkpoint before that of the iteration can be published."""

    def due(root: Any, iteration: int, *_: Any) -> bool:
        if iteration < SPEC["iteration"]:
            raise CheckpointError("stale file handle")
        return False

    before(folder, "publish", due)


def fail_in_evaluation(error: Exception) -> None:
    """An exception in the evaluation after the step, on this rank."""

    def due(*_: Any) -> bool:
        if STEPS[0] == SPEC["iteration"]:
            note()
            raise error
        return False

    before(trainer, "evaluate", due)


def throw(module: Any, name: str, error: BaseException) -> None:
    """A call of ``module.name`` always fails."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    setattr(module, name, call)
