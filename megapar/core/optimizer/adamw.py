"""AdamW on this rank's master weights, a shard of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.core.sharding.master_shard import MasterShard

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamW:
    """The hyperparameters of AdamW.

    Attributes:
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay.
        router_lr_ratio: Learning rate of router weights relative to all other weights.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    router_lr_ratio: float = 1.0


class Optimizer:
    """AdamW (decoupled weight decay) over master shards; moments correspond to ``shards`` one to one."""

    def __init__(self, shards: Sequence[MasterShard], settings: AdamW) -> None:
        self._shards = shards
        groups = [
            {
                "params": [shard.master for shard in shards if (shard.decay, shard.router) == kind],
                "weight_decay": settings.weight_decay if kind[0] else 0.0,
                "ratio": settings.router_lr_ratio if kind[1] else 1.0,
            }
            for kind in ((True, False), (True, True), (False, False))
        ]
        # Fused: the unfused implementation would read every parameter's step count and wait for the device.
        self._adamw: Any = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
        )
        for shard in shards:
            self._adamw.state[shard.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.master.device),
                **{name: torch.zeros_like(shard.master) for name in MOMENTS},
            }

    def step(self, lr: float, found_inf: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update all masters from their gradients.

        Args:
            found_inf: A scalar on the device; if it is 1, nothing changes. Only for devices that ``skips_updates``.
            grad_scale: A scalar in fp32 on the device, by which the kernel divides the gradients first. Only for
                devices that ``scales_gradients``, and masters in fp32.
        """
        self._adamw.found_inf, self._adamw.grad_scale = found_inf, grad_scale
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["ratio"]
        for shard in self._shards:
            shard.master.grad = shard.grad
        self._adamw.step()
        for shard in self._shards:
            shard.master.grad = None

    def moments(self, name: str) -> list[Tensor]:
        """Return ``exp_avg`` or ``exp_avg_sq`` of every shard."""
        return [self._adamw.state[shard.master][name] for shard in self._shards]

    @property
    def num_steps(self) -> int:
        """Number of updates so far, used for the bias correction."""
        return int(self._adamw.state[self._shards[0].master]["step"].item())

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for shard in self._shards:
            self._adamw.state[shard.master]["step"].fill_(float(steps))
