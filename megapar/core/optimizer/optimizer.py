"""The optimizer of this rank's master weights, a shard of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.optimizer.update_rule import UpdateRule
from megapar.core.sharding.master_shard import MasterShard


class _Group(NamedTuple):
    """Shards with the same learning rate and weight decay.

    Attributes:
        members: Their numbers.
        lr_ratio: Their learning rate relative to that of the step.
        weight_decay: Their weight decay.
    """

    members: tuple[int, ...]
    lr_ratio: float
    weight_decay: float


class Optimizer:
    """Updates master shards by a rule; states correspond to ``shards`` one to one.

    Attributes:
        states: Names of the states.
    """

    def __init__(self, shards: Sequence[MasterShard], rule: UpdateRule) -> None:
        self._shards = shards
        self._rule, self.states = rule, rule.states
        self._states = {name: [torch.zeros_like(shard.master) for shard in shards] for name in rule.states}
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.master.device) for shard in shards]
        self._groups = []
        for decay, router in product((True, False), repeat=2):
            members = tuple(n for n, shard in enumerate(shards) if (shard.decay, shard.router) == (decay, router))
            ratio = rule.router_lr_ratio if router else 1.0
            if members:
                self._groups.append(_Group(members, ratio, rule.weight_decay if decay else 0.0))

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update all masters from their gradients.

        Args:
            lr: Learning rate.
            found_inf: A scalar on the device; if it is 1, nothing changes. Only for devices that ``skips_updates``.
            grad_scale: A scalar in fp32 on the device, by which the kernel divides the gradients first. Only for
                devices that ``scales_gradients``, and masters in fp32.
        """
        for members, ratio, weight_decay in self._groups:
            shards = [self._shards[n] for n in members]
            grads = [shard.grad for shard in shards if shard.grad is not None]
            assert len(grads) == len(shards), "Sharding.finish sets every gradient"
            self._rule.update(
                [shard.master for shard in shards],
                grads,
                [[tensors[n] for n in members] for tensors in self._states.values()],
                [self._steps[n] for n in members],
                lr=lr * ratio,
                weight_decay=weight_decay,
                found_inf=found_inf,
                grad_scale=grad_scale,
            )

    def state(self, name: str) -> list[Tensor]:
        """Return a state of every shard."""
        return self._states[name]

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return int(self._steps[0].item())

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for step in self._steps:
            step.fill_(float(steps))
