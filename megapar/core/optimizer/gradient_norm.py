"""The global gradient norm, gradient clipping and scaling, on this rank's master shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import widest
from megapar.core.sharding.master_shard import MasterShard


def global_norm(
    shards: Sequence[MasterShard], world: Axis, besides: Sequence[int | Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the global gradient norm, and sums of other numbers that share its all-reduce. The host does not wait.

    The 2-norm counts each parameter of the model once, however it is replicated or split: exactly one rank counts each
    shard (``MasterShard.counted``), and one sum over the world adds them. The squares are added in the device's widest
    dtype, so that the order of ranks does not affect the result.

    Args:
        shards: This rank's master shards, with gradients.
        world: The axis of all ranks.
        besides: Small numbers of this rank to be summed over all ranks, on the host or scalars on the device.

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


def clip_gradients(shards: Sequence[MasterShard], norm: Tensor, limit: float) -> None:
    """Clip gradients: scale all of them by min(1, limit / (norm + 1e-6)), without a host wait."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    torch._foreach_mul_(grads, factor)


def scale_gradients(shards: Sequence[MasterShard], factor: float) -> None:
    """Multiply all gradients by one number."""
    torch._foreach_mul_([shard.grad for shard in shards if shard.grad is not None], factor)
