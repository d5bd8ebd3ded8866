"""Faults of arithmetic: one product of a linear layer gives a wrong number, at times or for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megapar.health.corruption.recompute_guard import RecomputeGuard
from megapar.trainer import Trainer

WRONG = 1.5  # times one element
MODULE = "layers.1.attention.qkv"


def spoil(trainer: Trainer, due: Callable[[], bool]) -> None:
    """One element of the layer's product is another one while it is due."""

    def hook(module: object, inputs: object, output: Tensor) -> Tensor:
        if not due():
            return output
        factor = output.new_ones(output.numel())
        factor[-1] = WRONG  # a value: the first position asks for nobody but itself, whatever its query
        return output * factor.view_as(output)

    dict(trainer.job.model.named_modules())[MODULE].register_forward_hook(hook)


def lasting(iteration: int, note: Callable[[], None]) -> None:
    """Behind the step, in every run of a micro-batch: the same wrong number each time."""
    kept, struck = Trainer.train, [False]

    def run(self: Trainer) -> Any:
        def due() -> bool:
            begun = self.progress.iteration >= iteration
            if begun and not struck[0]:
                note()
                struck[0] = True
            return begun

        spoil(self, due)
        return kept(self)

    Trainer.train = run  # type: ignore[method-assign]


def passing(iteration: int, note: Callable[[], None]) -> None:
    """Once, while a micro-batch is run a second time after the step."""
    kept_run, kept_check = Trainer.train, RecomputeGuard._run
    runs = [0]

    def run(self: Trainer) -> Any:
        def due() -> bool:
            return runs[0] == 2 and self.progress.iteration == iteration

        spoil(self, due)
        return kept_run(self)

    def check(self: RecomputeGuard, work: Any) -> Any:
        if work.iteration == iteration:
            runs[0] += 1
            if runs[0] == 2:
                note()
        return kept_check(self, work)

    Trainer.train = run  # type: ignore[method-assign]
    RecomputeGuard._run = check  # type: ignore[method-assign]
