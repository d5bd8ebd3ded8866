"""RMS norms of queries and keys over the features of all heads, which are split over mp.

Each rank sums the squares of its heads; one all-reduce of two numbers per position makes both means whole. The backward
has one more. Sums are computed and sent in max(fp32, dtype). Source: the norms of OLMo 2 (arXiv 2501.00656).

Shape letters: B samples, S positions, N heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.autograd import all_reduce_
from megapar.core.comm.axis import Axis
from megapar.core.device.compiled import FunctionRunner, counted, plain
from megapar.core.device.dtypes import at_least_fp32


@dataclass(frozen=True)
class SplitNorm:
    """RMS norms over heads that are split over an axis: x / sqrt(mean over all heads(x^2) + epsilon) * weight."""

    epsilon: float
    mp: Axis
    run: FunctionRunner = plain

    def __call__(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys [B, S, N, D] each by their weights [N, D]; N of keys may differ."""
        return _Normalize.apply(q, k, q_weight, k_weight, self)

    def whole(self, sums: Tensor, *like: Tensor) -> list[Tensor]:
        """Sum [.., 2] over the axis in place; return the means over the features of each of ``like``, [.., 1, 1]."""
        all_reduce_(sums, self.mp)
        pairs = zip(sums.unbind(-1), like, strict=True)
        return [part[..., None, None] / (x.shape[-2] * x.shape[-1] * self.mp.size) for part, x in pairs]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, norm: SplitNorm
    ) -> tuple[Tensor, Tensor]:
        squares = norm.whole(norm.run(sums_of_products, q, k, q, k), q, k)
        ctx.norm = norm
        ctx.save_for_backward(q, k, q_weight, k_weight, *squares)
        run, epsilon = norm.run, norm.epsilon
        return run(scaled, q, squares[0], q_weight, epsilon), run(scaled, k, squares[1], k_weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, *squares = ctx.saved_tensors
        dq, dk = grads
        norm, run, epsilon = ctx.norm, ctx.norm.run, ctx.norm.epsilon
        products = norm.whole(run(sums_of_products, q, k, dq, dk, q_weight, k_weight), q, k)
        dq, dq_weight = run(scaled_gradients, dq, q, squares[0], products[0], q_weight, epsilon)
        dk, dk_weight = run(scaled_gradients, dk, k, squares[1], products[1], k_weight, epsilon)
        return dq, dk, dq_weight, dk_weight, None


@counted(2, 2, 2, 2)
def sums_of_products(
    q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None
) -> Tensor:
    """Return sum(q dq q_weight) and sum(k dk k_weight) over heads and features, [B, S, 2] in max(fp32, dtype)."""
    sums = [_sum_of_products(x, dx, weight) for x, dx, weight in ((q, dq, q_weight), (k, dk, k_weight))]
    return torch.stack(sums, dim=-1)


def _sum_of_products(x: Tensor, dx: Tensor, weight: Tensor | None) -> Tensor:
    wide = at_least_fp32(x.dtype)
    product = x.to(wide) * dx.to(wide)
    return (product if weight is None else product * weight).sum((-2, -1))


@counted(2, 2)
def scaled(x: Tensor, square: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x [B, S, N, D] / sqrt(square [B, S, 1, 1] + epsilon) * weight [N, D], rounded to its dtype before it."""
    return (weight * (x.to(square.dtype) * torch.rsqrt(square + epsilon)).to(weight.dtype)).to(x.dtype)


@counted(2, 2, 2, 2)
def scaled_gradients(
    dy: Tensor, x: Tensor, square: Tensor, product: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``scaled``'s x and weight, with those that reach x through the mean of squares.

    Args:
        dy: Gradient of the output, [B, S, N, D].
        x: Input, [B, S, N, D].
        square: Mean of the squares over all heads, [B, S, 1, 1].
        product: Mean of x dy weight over all heads, [B, S, 1, 1].
    """
    scale = torch.rsqrt(square + epsilon)
    x_wide, dy_wide = x.to(square.dtype), dy.to(square.dtype)
    dx = scale * (dy_wide * weight - x_wide * (scale * scale * product))
    return dx.to(x.dtype), (dy_wide * x_wide * scale).sum((0, 1)).to(weight.dtype)
