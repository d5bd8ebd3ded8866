"""AdamW on this rank's master weights (a shard of them), the global gradient norm, and gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import widest
from megapar.core.sharding.master_shard import MasterShard

MOMENTS = ("exp_avg", "exp_avg_sq")


def global_norm(
    shards: Sequence[MasterShard], world: Axis, besides: Sequence[int | Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the global gradient norm, and sums of other numbers that share its all-reduce. The host does not wait.

    The 2-norm counts each parameter of the model once, however it is replicated or split: exactly one rank counts each
    shard (``MasterShard.counted``), and one sum over the world adds them. The squares are added in the device's widest
    dtype, so that the order of ranks does not affect the result.

    Args:
        shards: this rank's master shards, with gradients.
        world: the axis of all ranks.
        besides: small numbers of this rank to be summed over all ranks, on the host or scalars on the device.

    Returns:
        The norm (a scalar, the same on all ranks) and the sums of ``besides``, both on the device of the gradients.
    """
    grads = [shard.grad for shard in shards if shard.counted and shard.grad is not None and shard.grad.numel()]
    made = next((shard.grad for shard in shards if shard.grad is not None), shards[0].master)
    device, dtype = made.device, shards[0].master.dtype
    total = torch.zeros(1 + len(besides), dtype=widest(device), device=device)
    for i, number in enumerate(besides, start=1):
        if isinstance(number, Tensor):
            total[i].copy_(number)
        elif number:
            total[i].fill_(number)  # a copy from the host would wait for the device
    if grads:
        total[0] = torch.stack([norm.to(total.dtype) for norm in torch._foreach_norm(grads)]).square().sum()
    if world.group is not None:
        collectives.all_reduce(total, world)
    return total[0].sqrt().to(dtype), total[1:]


def clip(shards: Sequence[MasterShard], norm: Tensor, limit: float) -> None:
    """Clip gradients: scale all of them by min(1, limit / (norm + 1e-6)), without a host wait."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    torch._foreach_mul_(grads, factor)


def scale_gradients(shards: Sequence[MasterShard], factor: float) -> None:
    """Multiply all gradients by one number."""
    torch._foreach_mul_([shard.grad for shard in shards if shard.grad is not None], factor)


@dataclass(frozen=True)
class AdamW:
    """The hyperparameters of AdamW.

    Attributes:
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay.
        router_lr_ratio: learning rate of router weights relative to all other weights.
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

    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """Update all masters from their gradients.

        found_inf: a scalar on the device; if it is 1, nothing changes. Only for devices that ``skips_updates``.
        """
        self._adamw.found_inf = found_inf
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
