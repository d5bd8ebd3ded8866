"""Linear layers of many experts at once, over rows that are sorted by expert, by the device's own grouped product.

Shape letters: R rows, I input features, O output features, E experts on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.ops import op
from megapar.core.weight_gradients import Later


def grouped_linear(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, later: Later | None = None) -> Tensor:
    """[R, O]: each row times the transposed weight of its expert.

    rows_RI: the rows of expert 0, then those of expert 1, and so on. counts_E: int64, rows of each expert,
    some perhaps 0; they must sum to R, because what lies beyond is not computed. later: gets the product of the
    weight's gradient (``core.weight_gradients``).
    """
    if later is not None:
        return _SplitBackward.apply(rows_RI, weight_EOI, counts_E, later)  # type: ignore[no-any-return]
    return op("grouped_linear", rows_RI)(rows_RI, weight_EOI, counts_E)


class _SplitBackward(torch.autograd.Function):
    """dx [R, I] at once, dw [E, O, I] when ``later`` says."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, later: Later) -> Tensor:
        ctx.later = later
        ctx.save_for_backward(rows, weight, counts)
        return grouped_linear(rows, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight, counts), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = op("grouped_input_gradient", dy)(dy, weight, counts) if ctx.needs_input_grad[0] else None

        def product() -> Tensor:
            return op("grouped_weight_gradient", dy)(dy, rows, counts)

        return dx, ctx.later(product) if ctx.needs_input_grad[1] else None, None, None
