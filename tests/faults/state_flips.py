"""Memory that does not keep what is written: bits of masters and moments that flip behind a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megapar.trainer import Trainer


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
            parts = self.job.sharding.parts
            tensors = [part.master for part in parts] if name == "master" else self.job.optimizer.moments(name)
            with torch.no_grad():
                tensors[len(tensors) // 2].view(-1)[:1].view(torch.int32)[1:] ^= 1 << 12  # fp64: of the upper half
        return done

    Trainer.step = step  # type: ignore[method-assign]
