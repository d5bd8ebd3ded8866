"""Grouped GEMM: the linear layers of many experts at once, over rows sorted by expert.

Uses the device's grouped product, or one product per expert if the device has none and the host has the row counts.

Shape letters: R rows, I input features, O output features, E experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.grouped import input_gradient_by_size, linear_by_size, weight_gradient_by_size
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.weight_gradients import DeferWgrad


def grouped_linear(
    rows_RI: Tensor,
    weight_EOI: Tensor,
    counts_E: Tensor,
    defer_wgrad: DeferWgrad | None = None,
    sizes_E: tuple[int, ...] | None = None,
    ends: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Multiply each row by the transposed weight of its expert: [R, O].

    Args:
        rows_RI: The rows of expert 0, then those of expert 1, and so on.
        weight_EOI: The weights of all experts.
        counts_E: int64, rows of each expert, possibly 0; they must sum to R, because further rows are not computed.
        defer_wgrad: Defers the product of the weight gradient (``weight_gradients``); None: the backward computes it.
        sizes_E: The counts on the host; passed if the device's product would otherwise copy them to the host.
        ends: Returns ``row_ends`` of the counts, if several products share it.
    """
    if defer_wgrad is not None:
        product: Tensor = _SplitBackward.apply(rows_RI, weight_EOI, counts_E, defer_wgrad, sizes_E)
        return product
    if sizes_E is not None:
        return linear_by_size(rows_RI, weight_EOI, sizes_E)
    return op("grouped_linear", rows_RI)(rows_RI, weight_EOI, counts_E, ends)


class _SplitBackward(torch.autograd.Function):
    """Backward with dx [R, I] computed at once and dw [E, O, I] deferred to ``defer_wgrad``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, defer_wgrad: DeferWgrad, sizes: tuple[int, ...] | None
    ) -> Tensor:
        ctx.defer_wgrad, ctx.sizes = defer_wgrad, sizes
        ctx.save_for_backward(rows, weight, counts)
        return grouped_linear(rows, weight, counts, sizes_E=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight, counts), dy = ctx.saved_tensors, grads[0].contiguous()
        sizes, dx = ctx.sizes, None
        if ctx.needs_input_grad[0]:
            grouped = op("grouped_input_gradient", dy)
            dx = grouped(dy, weight, counts) if sizes is None else input_gradient_by_size(dy, weight, sizes)

        def product() -> Tensor:
            if sizes is not None:
                return weight_gradient_by_size(dy, rows, sizes)
            return op("grouped_weight_gradient", dy)(dy, rows, counts)

        return dx, ctx.defer_wgrad(product) if ctx.needs_input_grad[1] else None, None, None, None
