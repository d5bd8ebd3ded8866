"""AdamW with two-byte state: moments, gradients, and master weights as remainders (``core.device.adamw``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.device.adamw import AdamWStep
from megapar.core.device.dtypes import widest
from megapar.core.device.ops import op
from megapar.core.optimizer.update_rule import AdamW, Update


@dataclass(frozen=True)
class RoundedAdamW(AdamW):
    """``AdamW`` whose moments and gradients may be bf16, and whose masters may be split.

    Attributes:
        rounds: For each moment, whether it is kept in bf16, or else in the dtype of the masters.
    """

    rounds: tuple[bool, bool] = (False, False)

    def state_dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        """See ``UpdateRule``."""
        return torch.bfloat16 if self.rounds[self.states.index(name)] else master

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``."""
        number = (update.steps[0] + 1).to(torch.int64)
        step = AdamWStep(number, self._numbers(update), update.found_inf, update.grad_scale)
        form, shards = op("adamw", step.numbers), (update.masters, update.grads, *update.states, update.weights)
        for *tensors, pieces in zip(*shards, update.pieces, strict=True):
            form(tuple(tensors), pieces, step)
        update.count()

    def _numbers(self, update: Update) -> Tensor:
        """Return ``AdamWStep.numbers``, without a copy from the host, which would wait for the device."""
        (beta1, beta2), number = self.betas, (update.steps[0] + 1).to(widest(update.steps[0].device))
        rate, root = (1 - beta1**number).reciprocal() * update.lr, (1 - beta2**number).sqrt()
        known = beta1, 1 - beta1, beta2, 1 - beta2, self.eps, 1 - update.lr * update.weight_decay
        numbers = torch.stack([rate, root, *(torch.full_like(rate, value) for value in known)])
        return numbers.to(torch.promote_types(update.grads[0].dtype, torch.float32))
