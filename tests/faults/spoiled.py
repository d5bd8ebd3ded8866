"""Faults that leave a process running with what is wrong: in memory, on disk, in what it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megapar import trainer
from megapar.checkpoints.save_load import folder, storage
from megapar.errors import CheckpointError
from megapar.health.corruption.guards import ReplicaGuard
from megapar.trainer import Trainer
from megapar.training.step.batches import BatchFeed
from tests.faults.striking import RANK, SPEC, STEPS, before, note, strike


def not_a_number(always: bool) -> None:
    """A module of this rank gives NaN: once in the step, or in every step from there on."""
    kept = Trainer.train

    def run(self: Trainer) -> Any:
        struck: list[int] = []

        def hook(module: object, inputs: object, output: Any) -> Any:
            due = self.progress.iteration + 1 >= SPEC["iteration"] and (always or not struck)
            if not due:
                return output
            if not struck:
                note()
                struck.append(1)
            return output * torch.nan

        dict(self.job.model.named_modules())["layers.1.mlp_norm"].register_forward_hook(hook)
        return kept(self)

    Trainer.train = run  # type: ignore[method-assign]


def diverge() -> None:
    """One bit of a parameter of this rank is another one after the step."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        if self.progress.iteration == SPEC["iteration"]:
            note()
            self.job.sharding.wait()
            with torch.no_grad():
                dict(self.job.model.named_parameters())["final_norm.weight"][0] *= 1 + 1e-12
        return done

    Trainer.step = step  # type: ignore[method-assign]


def flip_in_memory() -> None:
    """One bit of what this rank holds of a parameter is another one after the step. name: master, moment, parameter."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        if self.progress.iteration == SPEC["iteration"]:
            self.job.sharding.wait()  # on every rank: it may begin what others take part in
            if SPEC["rank"] != RANK:
                return done
            note()
            held = self.job.sharding.views
            tensors = {
                "master": lambda: [
                    view.tensor for view in held([shard.master for shard in self.job.sharding.master_shards])
                ],
                "moment": lambda: [view.tensor for view in held(self.job.optimizer.state("exp_avg"))],
                "parameter": lambda: list(self.job.model.parameters()),
            }[SPEC["name"]]()
            whole = next(tensor for tensor in tensors if tensor.numel())  # type: ignore[attr-defined]
            whole.detach().view(-1)[:1].view(torch.int64).bitwise_xor_(1 << 44)
        return done

    Trainer.step = step  # type: ignore[method-assign]


def by_interval_only() -> None:
    """The replica guard, on every rank, as a check that costs too much to run before saves."""
    ReplicaGuard.before_saves = False


def damage_local() -> None:
    """Kill this rank in the step, with its newest local checkpoint damaged."""

    def due(trainer: Trainer, *_: Any) -> bool:
        if trainer.progress.iteration + 1 == SPEC["iteration"]:
            saves = trainer.local_saves
            assert saves is not None
            saves.join_save()
            newest = max(saves.local._iterations().items())[1]
            path = newest / f"rank-{RANK:05d}.{SPEC['name']}"
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 16
            path.write_bytes(content if SPEC["harm"] == "bit flip" else content[: len(content) // 2])
            strike()
        return False

    before(Trainer, "step", due)


def damage_disk() -> None:
    """Kill this rank in the step, with the newest checkpoint on disk damaged."""

    def due(trainer: Trainer, *_: Any) -> bool:
        if trainer.progress.iteration + 1 == SPEC["iteration"]:
            trainer.checkpoints.join_save()
            if trainer.local_saves is not None:
                trainer.local_saves.join_save()
            newest = max(Path(SPEC["name"]).glob("iter_*"))
            path = next(newest.glob("shard-*"))
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 16
            path.write_bytes(content)
            strike()
        return False

    before(Trainer, "step", due)


def no_space_check() -> None:
    """The disk is full before anybody has looked."""
    storage._check_space = lambda *_: None


def fail_in_step(error: Exception) -> None:
    """An exception in the step, on this rank."""
    kept = BatchFeed.next

    def following(self: BatchFeed, loader: Any, progress: Any) -> Any:
        if progress.iteration + 1 == SPEC["iteration"]:
            note()
            raise error
        return kept(self, loader, progress)

    BatchFeed.next = following  # type: ignore[method-assign]


def fail_publications() -> None:
    """No checkpoint before that of the iteration can be published."""
    kept = folder.publish

    def publish(root: Any, iteration: int, *owner: Any) -> None:
        if iteration < SPEC["iteration"]:
            raise CheckpointError("stale file handle")
        kept(root, iteration, *owner)

    folder.publish = publish


def fail_in_evaluation(error: Exception) -> None:
    """An exception in the evaluation after the step, on this rank."""
    kept = trainer.evaluate  # type: ignore[attr-defined]

    def evaluated(*args: Any) -> Any:
        if STEPS[0] == SPEC["iteration"]:
            note()
            raise error
        return kept(*args)

    trainer.evaluate = evaluated  # type: ignore[attr-defined]


def throw(module: Any, name: str, error: BaseException) -> None:
    """A call of ``module.name`` always fails."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    setattr(module, name, call)
