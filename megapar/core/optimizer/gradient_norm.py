"""The global gradient norm, gradient clipping and scaling, on this rank's master shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import widest
from megapar.core.optimizer import exact_sum
from megapar.core.sharding.master_shard import MasterShard

LIST_ELEMENTS = 320 * 65_536  # of a list of tensors, in one launch of torch's multi-tensor kernels on a GPU
CPU_ROW = 4096  # elements whose squares a CPU adds one after another; a GPU's kernels add in a tree


def global_norm(
    shards: Sequence[MasterShard],
    world: Axis,
    besides: Sequence[int | Tensor] = (),
    *,
    valid: bool = True,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the global gradient norm, and sums of other numbers that share its all-reduce. The host does not wait.

    The 2-norm counts each parameter of the model once, however it is replicated or split: exactly one rank counts each
    shard (``MasterShard.counted``), and one sum over the world adds them. The squares are added in the device's widest
    dtype, so that the order of ranks does not affect the result.

    Args:
        besides: Small numbers of this rank to be summed over all ranks, on the host or scalars on the device.
        valid: False makes the norm NaN on all ranks, so that none applies the gradients.
        exact: The norm has the same bits wherever the ``parts`` of shards are, if the device has fp64.

    Returns:
        The norm (a scalar, the same on all ranks), and a vector of the norm and the sums of ``besides`` for one copy to
        the host; both on the device of the gradients.
    """
    grads = [shard.grad for shard in shards if shard.counted and shard.grad is not None and shard.grad.numel()]
    made = next((shard.grad for shard in shards if shard.grad is not None), shards[0].master)
    device, dtype = made.device, shards[0].dtype
    exact = exact and widest(device) == torch.float64
    numbers = 1 + len(besides)
    total = torch.zeros(numbers + len(exact_sum.UNITS) * exact, dtype=widest(device), device=device)
    for i, number in enumerate(besides, start=1):
        if isinstance(number, Tensor):
            total[i].copy_(number)
        elif number:
            total[i].fill_(number)  # a copy from the host would wait for the device
    if exact:
        grads = [part for shard in shards if shard.counted for part in _parts(shard)]
    if grads:
        squares = torch.stack(_norms(grads, dtype)).to(total.dtype).square_()
        if exact:
            total[numbers:] = exact_sum.parts(squares)
        else:
            torch.sum(squares, 0, out=total[0])
    if not valid:
        total[0].fill_(math.nan)
    if world.group is not None:
        collectives.all_reduce(total, world)
    if exact:
        total, units = total.split([numbers, len(exact_sum.UNITS)])
        total[0] += exact_sum.total(units)
    norm = torch.sqrt(total[0], out=torch.empty((), dtype=dtype, device=device))
    total[0].copy_(norm)
    return norm, total


def _parts(shard: MasterShard) -> Sequence[Tensor]:
    """Return the gradient cut into its parts, without empty ones."""
    if shard.grad is None or not shard.grad.numel():
        return ()
    return shard.grad.split(list(shard.parts)) if shard.parts else (shard.grad,)


def _norms(grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norms of tensors or, on a CPU, of their whole rows of ``CPU_ROW`` elements and the rests.

    A plain reduction takes a tensor of any size at once, a multi-tensor norm many small ones. A CPU adds in ``dtype``,
    so that the norm of a long one would depend on its length: in fp32 64 M elements lose 0.5 %.
    """

    def widened(grad: Tensor) -> torch.dtype | None:
        return None if grad.dtype == dtype else dtype

    rows = []
    if grads[0].device.type == "cpu":
        cuts = [(grad.reshape(-1), grad.numel() // CPU_ROW * CPU_ROW) for grad in grads]
        wholes = [flat[:end].view(-1, CPU_ROW) for flat, end in cuts if end]
        rows = [torch.linalg.vector_norm(whole, dim=1, dtype=widened(whole)) for whole in wholes]
        grads = [flat[end:] for flat, end in cuts if end < flat.numel()]
    large = [grad for grad in grads if grad.numel() > LIST_ELEMENTS]
    small = [grad for grad in grads if grad.numel() <= LIST_ELEMENTS]
    whole_rows = [torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows]
    alike = [[grad for grad in small if grad.dtype == each] for each in dict.fromkeys(grad.dtype for grad in small)]
    norms = [norm for same in alike for norm in torch._foreach_norm(same, dtype=widened(same[0]))]
    return [*whole_rows, *(torch.linalg.vector_norm(grad, dtype=widened(grad)) for grad in large), *norms]


def found_nonfinite(norm: Tensor) -> Tensor:
    """Return found_inf for ``Optimizer.step``: a scalar in fp32, 1 if the norm is not finite, else 0."""
    return torch.ne(norm * 0.0, 0.0, out=torch.empty((), device=norm.device))  # infinity * 0 is NaN, which is not 0


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """Return the number by which ``clip_gradients`` divides: for an optimizer that divides in its own kernel."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip_gradients(shards: Sequence[MasterShard], norm: Tensor, limit: float) -> None:
    """Clip gradients: scale all of them by min(1, limit / (norm + 1e-6)), without a host wait."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    torch._foreach_mul_(grads, factor)


def scale_gradients(shards: Sequence[MasterShard], factor: float) -> None:
    """Multiply all gradients by one number."""
    torch._foreach_mul_([shard.grad for shard in shards if shard.grad is not None], factor)
