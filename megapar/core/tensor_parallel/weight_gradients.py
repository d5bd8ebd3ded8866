"""Weight gradients that are computed apart from the input gradients, as zero-bubble pipelines need them.

    backward of a layer    dx = dy @ w                now: the stage before waits for it
                           dw = dy^T @ x              kept as a product, run when the pipeline is idle

One pass of autograd gives the input gradients and all small gradients (norms, biases, embeddings, router); the products
of the large weights are left out of it and made by ``run``, which accumulates them as a backward would, hooks included.
So nothing runs twice: a collective in the backward is launched once, a ticket is waited for once.

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

from megapar.core.device.dtypes import at_least_fp32
from megapar.core.recompute.replay import Replay

Product = Callable[[], Tensor]
Later = Callable[[Product], Tensor | None]


class WeightGradients:
    """Products of weight gradients that wait for their turn; outside ``keep`` they are made at once."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Parameter, int | None, Product]] | None = None
        self._kept: dict[Hashable, list[tuple[nn.Parameter, int | None, Product]]] = {}

    def of(self, parameter: nn.Parameter, piece: int | None = None) -> Later:
        """What a layer asks in its backward: takes the product, gives the gradient, or None where it comes later.

        piece: the place along dim 0 that the product belongs to; None: it is that of the whole parameter.
        """

        def later(product: Product) -> Tensor | None:
            if self._open is None:
                return product()
            self._open.append((parameter, piece, product))
            return None

        return later

    @contextmanager
    def keep(self, key: Hashable) -> Iterator[None]:
        """Products of the backward inside are kept under ``key``."""
        self._open = self._kept.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def run(self, key: Hashable) -> None:
        """Make what was kept under ``key``, in the order of its backward, the products of one parameter together."""
        products: dict[nn.Parameter, dict[int | None, list[Product]]] = {}
        for parameter, piece, product in self._kept.pop(key):
            products.setdefault(parameter, {}).setdefault(piece, []).append(product)
        for parameter, pieces in products.items():
            with torch.no_grad():
                gradient = _whole(parameter, pieces)
            # A leaf's own backward: adds the gradient up and fires the parameter's hooks.
            torch.autograd.backward((parameter,), (gradient,))


def _whole(parameter: nn.Parameter, pieces: dict[int | None, list[Product]]) -> Tensor:
    """A parameter's gradient from the products of its uses, or of its pieces' uses."""
    if None in pieces:
        return _sum(pieces[None]).view(parameter.shape)
    gradient = torch.zeros_like(parameter)
    for piece, uses in pieces.items():
        assert piece is not None
        gradient[piece] = _sum(uses).view(gradient[piece].shape)
    return gradient


def _sum(products: list[Product]) -> Tensor:
    """Summed in max(fp32, dtype) and rounded once. Empties the list: what a product holds on to is free behind it."""
    products.reverse()
    first = products.pop()()
    if not products:
        return first
    total = first.to(at_least_fp32(first.dtype))
    while products:
        total += products.pop()()
    return total.to(first.dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, later: Later | None, closing: Replay | None = None
) -> Tensor:
    """x [.., I] @ w [O, I]^T + b [O] -> [.., O]; ``later`` gets the product of the weight's gradient.

    closing: the recomputed unit whose output needs this and nothing else.
    """
    if later is None and closing is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, later or _now, closing)  # type: ignore[no-any-return]


def _now(product: Product) -> Tensor:
    return product()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later, closing: Replay | None
    ) -> Tensor:
        ctx.later, ctx.biased = later, bias is not None
        ctx.save_for_backward(x, weight)
        if closing is not None and closing.again:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        rows = dy.flatten(0, -2)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = ctx.later(lambda: rows.t() @ x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0) if ctx.biased else None, None, None
