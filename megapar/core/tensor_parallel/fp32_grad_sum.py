"""Gradients of weights that are used several times in a pass, summed in fp32 and rounded once.

Autograd adds the gradients of all uses of a tensor in the dtype of the tensor. A layer that runs in d slices uses each
weight d times, and in a 16-bit dtype every addition rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NAME = "fp32_grad_sum"


class Fp32GradSum:
    """The sum of one weight's gradients over its uses in a pass."""

    def __init__(self) -> None:
        self._open = 0
        self._total: Tensor | None = None
        self._dtype = torch.float32  # of the gradients

    def use(self, x: Tensor) -> Tensor:
        """Return ``x`` for one use, whose gradient joins the sum. The last use in the backward returns the sum."""
        return _Use.apply(x, self)

    def begin(self) -> None:
        """Count one more use."""
        self._open += 1

    def add(self, grad: Tensor | None) -> Tensor | None:
        """Add the gradient of one use. Returns the sum in the dtype of the weight after the last use, else None.

        ``grad`` is None if the weight gradient of this use is computed later, or was added to a bucket.
        """
        self._open -= 1
        if grad is not None:
            if self._total is None and not self._open:
                return grad
            self._dtype = grad.dtype
            self._total = grad.to(torch.float32) if self._total is None else self._total.add_(grad)
        if self._open or self._total is None:
            return None
        total, self._total = self._total.to(self._dtype), None
        return total


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Fp32GradSum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        total.begin()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(grads[0]), None


@contextmanager
def fp32_grad_sums(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Sum the gradients of 16-bit parameters in fp32, over all uses inside that ``with_fp32_grad_sum`` returned."""
    marked = [p for p in parameters if p.requires_grad and p.dtype.itemsize < 4 and torch.is_grad_enabled()]
    for parameter in marked:
        setattr(parameter, _NAME, Fp32GradSum())
    try:
        yield
    finally:
        for parameter in marked:
            delattr(parameter, _NAME)


def with_fp32_grad_sum(parameter: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, this rank's shard of the parameter, for one use; inside ``fp32_grad_sums`` it joins the sum."""
    total = getattr(parameter, _NAME, None)
    return local if total is None else total.use(local)
