"""Weight gradients that are computed separately from input gradients, as zero-bubble pipelines need them.

    backward of a layer    dx = dy @ w                at once: the previous stage waits for it
                           dw = dy^T @ x              kept as a product, run when the pipeline is idle

One pass of autograd computes the input gradients and all small gradients (norms, biases, embeddings, router). It skips
the products of the large weights. ``run`` computes them later and accumulates them as a backward would, including the
hooks. Nothing runs twice: a collective in the backward is launched once, and a ticket is waited for once.

Source: the split of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.core.device.dtypes import WeightProduct, at_least_fp32
from megapar.core.device.ops import op
from megapar.core.recompute.replay import Replay
from megapar.core.sharding.gradient_sink import gradient_sink
from megapar.core.tensor_parallel.fp8 import Fp8Weight, product

Product = Callable[[], Tensor]
DeferWgrad = Callable[[Product], Tensor | None]


class WeightGradients:
    """Deferred products of weight gradients. Outside ``keep`` they are computed at once."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Parameter, int | None, Product]] | None = None
        self._kept: dict[Hashable, list[tuple[nn.Parameter, int | None, Product]]] = {}

    def of(self, parameter: nn.Parameter, piece: int | None = None) -> DeferWgrad:
        """Return the function that a layer calls in its backward with the product of this parameter's gradient.

        It returns the gradient, or None if the product is deferred. ``piece`` is the product's index along dim 0 of the
        parameter; None for all of it.
        """

        def defer(product: Product) -> Tensor | None:
            if self._open is None:
                return product()
            self._open.append((parameter, piece, product))
            return None

        return defer

    @contextmanager
    def keep(self, key: Hashable) -> Iterator[None]:
        """Keep the products of the backward inside under ``key``."""
        self._open = self._kept.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def run(self, key: Hashable) -> None:
        """Compute the products kept under ``key``, in the order of their backward, those of a parameter together."""
        products: dict[nn.Parameter, dict[int | None, list[Product]]] = {}
        for parameter, piece, kept in self._kept.pop(key):
            products.setdefault(parameter, {}).setdefault(piece, []).append(kept)
        for parameter, pieces in products.items():
            with torch.no_grad():
                gradient = _whole(parameter, pieces)
            # The backward of the leaf itself accumulates the gradient and fires the parameter's hooks.
            torch.autograd.backward((parameter,), (gradient,))


def defer_wgrad_of(parameter: nn.Parameter, weight_gradients: WeightGradients | None) -> DeferWgrad | None:
    """Return what a layer calls with the product of this parameter's gradient; None to compute it like any other.

    Without a split backward, the product is added to the parameter's bucket if that takes products.
    """
    return gradient_sink(parameter) if weight_gradients is None else weight_gradients.of(parameter)


def _whole(parameter: nn.Parameter, pieces: dict[int | None, list[Product]]) -> Tensor:
    """Return a parameter's gradient from the products of its uses, or of the uses of its pieces."""
    if None in pieces:
        return _sum(pieces[None]).view(parameter.shape)
    gradient = torch.zeros_like(parameter)
    for piece, uses in pieces.items():
        assert piece is not None
        gradient[piece] = _sum(uses).view(gradient[piece].shape)
    return gradient


def _sum(products: list[Product]) -> Tensor:
    """Sum the products in max(fp32, dtype) and round once. Empties the list to free the inputs of each product."""
    products.reverse()
    first = products.pop()()
    if not products:
        return first
    total = first.to(at_least_fp32(first.dtype))
    while products:
        total += products.pop()()
    return total.to(first.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    defer_wgrad: DeferWgrad | None,
    ends_unit: Replay | None = None,
    fp8: Fp8Weight | None = None,
) -> Tensor:
    """Compute x [.., I] @ w [O, I]^T + b [O] -> [.., O].

    Args:
        defer_wgrad: Called in the backward with the product of the weight gradient, which it returns, defers, or adds
            to a bucket; None to leave it to autograd.
        ends_unit: The recomputed unit whose output is this product. Its recomputation skips it.
        fp8: Casts of the weight, for a forward and an input gradient in fp8.
    """
    if defer_wgrad is None and ends_unit is None and fp8 is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, defer_wgrad or _now, ends_unit, fp8)


def linear_onto(
    total: Tensor, x: Tensor, weight: Tensor, defer_wgrad: DeferWgrad | None, ends_unit: Replay | None
) -> Tensor:
    """Add x [.., I] @ w [O, I]^T in place to total [R, O], which no backward reads; R is the number of rows of x."""
    return _LinearOnto.apply(total, x, weight, defer_wgrad or _now, ends_unit)


def _now(product: Product) -> Tensor:
    return product()


class _LinearOnto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: Tensor, x: Tensor, weight: Tensor, defer_wgrad: DeferWgrad, ends_unit: Replay | None
    ) -> Tensor:
        ctx.defer_wgrad = defer_wgrad
        ctx.save_for_backward(x, weight)
        ctx.mark_dirty(total)
        if ends_unit is None or not ends_unit.recomputing:
            op("add_product", x)(total, x.flatten(0, -2), weight.t(), begins=False)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        dx = (dy @ weight).view(x.shape) if ctx.needs_input_grad[1] else None
        dw = ctx.defer_wgrad(WeightProduct(dy.t(), x.flatten(0, -2))) if ctx.needs_input_grad[2] else None
        return dy, dx, dw, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        defer_wgrad: DeferWgrad,
        ends_unit: Replay | None,
        fp8: Fp8Weight | None,
    ) -> Tensor:
        ctx.defer_wgrad, ctx.fp8 = defer_wgrad, fp8
        ctx.save_for_backward(x, weight)
        if ends_unit is not None and ends_unit.recomputing:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        return F.linear(x, weight, bias) if fp8 is None else product(x, fp8.forward(weight), bias, fp8.casts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        rows, dx = dy.flatten(0, -2), None
        if ctx.needs_input_grad[0]:
            dx = (
                (rows @ weight).view(x.shape)
                if ctx.fp8 is None
                else product(dy, ctx.fp8.backward(weight), casts=ctx.fp8.casts)
            )
        dw = ctx.defer_wgrad(WeightProduct(rows.t(), x.flatten(0, -2))) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None, None
