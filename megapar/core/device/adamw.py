"""The update of AdamW with two-byte state, with the same bits however tensors are cut.

Moments may be bf16, rounded stochastically; gradients may be bf16; and master weights may be bf16 weights with their
remainders (``remainders``). Each operation rounds once and works element by element: torch's fused kernel may round the
last elements of a tensor differently, and a moment would then round to another value on another layout. An update uses
the moments before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.device import triton_operators
from megapar.core.device.remainders import join_master, split_master
from megapar.core.device.stochastic_rounding import random_bits, rounded
from megapar.core.device.tensor_piece import ShardPieces, TensorPiece

SLAB = {"cpu": 1 << 15}  # elements of temporary tensors: those of a CPU stay in its caches
OTHER_SLAB = 1 << 22

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Master, gradient, first and second moment, and weights of a shard, in memory that is cut alike.

With weights in bf16, the master is their remainders; without (None), it is the values.
"""


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of an update.

    Attributes:
        update: Number of this update, from 1: a scalar int64 tensor on the device.
        numbers: [8] on the device, in the dtype of the masters: learning rate over the bias correction of the first
            moment, square root of the bias correction of the second moment, beta 1, 1 - beta 1, beta 2, 1 - beta 2,
            epsilon, and 1 - learning rate * weight decay.
        found_inf: A scalar on the device; if it is 1, nothing changes.
        grad_scale: A scalar on the device, by which gradients are divided first.
    """

    update: Tensor
    numbers: Tensor
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None


def adamw_reference(tensors: Tensors, pieces: ShardPieces, step: AdamWStep) -> None:
    """Change master, moments and weights of a shard in place. What lies between pieces, as padding, does not change.

    A moment in bf16 is rounded stochastically; another has the dtype of ``step.numbers``.
    """
    master, grad = tensors[:2]
    assert grad.stride() == master.stride(), "pieces are those of the master's memory"
    for piece in pieces.pieces:
        for slab in piece.slabs(SLAB.get(master.device.type, OTHER_SLAB)):
            _update(slab, tensors, step)


def _update(piece: TensorPiece, tensors: Tensors, step: AdamWStep) -> None:
    stored, grad, *moments = (piece.within(tensor) for tensor in tensors[:4])
    weights, wide = None if tensors[4] is None else piece.within(tensors[4]), step.numbers.dtype
    master = stored if weights is None else join_master(weights, stored)
    rate, root, beta1, rest1, beta2, rest2, eps, decay = step.numbers.unbind()
    g = grad.to(wide) if step.grad_scale is None else grad.to(wide) / step.grad_scale
    first = moments[0].to(wide) * beta1 + g * rest1
    second = moments[1].to(wide) * beta2 + (g * g).mul_(rest2)
    change = first / (_square_root(second) / root).add_(eps)
    new = [(master * decay).sub_(change.mul_(rate)), first, second]
    random = random_bits(piece.key, step.update, piece.indices(stored.device))
    for number, moment in enumerate(moments):
        if moment.dtype != wide:
            new[1 + number] = rounded(new[1 + number], random, number)
    changed = [stored, *moments]
    if weights is not None:
        upper, new[0] = split_master(new[0])
        changed, new = [*changed, weights], [*new, upper]
    for old, value in zip(changed, new, strict=True):
        old.copy_(value if step.found_inf is None else torch.where(step.found_inf > 0, old, value))


def _square_root(x: Tensor) -> Tensor:
    """Return the square root, rounded correctly. On a CPU that of fp32 sometimes errs in the last bit (MKL).

    A square root in fp64 is never so near the middle of two neighbours in fp32 that a second rounding errs.
    """
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return x.sqrt()
    return x.to(torch.float64).sqrt_().to(x.dtype)


def adamw_cuda(tensors: Tensors, pieces: ShardPieces, step: AdamWStep) -> None:
    """Compute ``adamw_reference`` by one kernel, in Triton, with the same bits; without Triton by the reference."""
    master = tensors[0]
    if triton_operators.usable(master.device) and step.numbers.dtype == torch.float32:
        given = step.update, step.numbers, step.found_inf, step.grad_scale
        triton_operators.update_adamw(tensors, given, pieces.table(master.device))
    else:
        adamw_reference(tensors, pieces, step)
