"""The optimizer of this rank's shards of the master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapar.core.device.tensor_piece import ShardPieces
from megapar.core.optimizer.update_rule import CONSTANT, StepRates, Update, UpdateRule
from megapar.core.sharding.master_shard import MasterShard


class Optimizer:
    """Updates master shards by a rule. pieces: Each shard's pieces of Hugging Face tensors, for rules that round."""

    def __init__(
        self, shards: Sequence[MasterShard], rule: UpdateRule, pieces: Sequence[ShardPieces] | None = None
    ) -> None:
        self._shards, self._pieces = shards, pieces
        self._rule, self.states = rule, rule.states
        self._states = {
            name: [zeros_of(shard.master, rule.state_dtype(name, shard.dtype)) for shard in shards]
            for name in rule.states
        }
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.master.device) for shard in shards]
        groups: dict[tuple[bool, bool, bool, float], list[int]] = {}  # shards with equal learning rate and weight decay
        for number, shard in enumerate(shards):
            alike = shard.decay, shard.router, shard.decoupled, shard.lr_factor
            groups.setdefault(alike, []).append(number)
        self._groups = list(groups.values())

    @torch.no_grad()
    def step(
        self, lr: float, found_inf: Tensor | None = None, grad_scale: Tensor | None = None, rates: StepRates = CONSTANT
    ) -> None:
        """Update all masters from their gradients. For ``found_inf`` and ``grad_scale`` see ``Update``."""
        for members in self._groups:
            shards = [self._shards[n] for n in members]
            grads = [shard.grad for shard in shards if shard.grad is not None]
            assert len(grads) == len(shards), "Sharding.finish sets every gradient"
            masters, steps = [shard.master for shard in shards], [self._steps[n] for n in members]
            states = [[tensors[n] for n in members] for tensors in self._states.values()]
            used = self._rule.rates(shards[0], lr, rates)
            pieces = [] if self._pieces is None else [self._pieces[n] for n in members]
            weights = [None if shard.weights is None else shard.weights() for shard in shards]
            self._rule.apply(Update(masters, grads, states, steps, *used, found_inf, grad_scale, pieces, weights))

    def state(self, name: str) -> Sequence[Tensor]:
        """Return a state of every shard."""
        return self._states[name]

    @property
    def next_update(self) -> Tensor:
        """The number of the next update, from 1: a scalar int64 tensor on the device."""
        return (self._steps[0] + 1).to(torch.int64)

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return int(self._steps[0].item())

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for step in self._steps:
            step.fill_(float(steps))


def zeros_of(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros in the shape of a master, in memory of a whole number of 32-bit integers, as digests read it."""
    if dtype == master.dtype:
        return torch.zeros_like(master)
    numel = master.numel()
    return torch.zeros(numel + numel % 2, dtype=dtype, device=master.device)[:numel].view(master.shape)
