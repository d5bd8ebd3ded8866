"""Embeddings of few rows, such as token types and learned positions.

Shape letters: N indices, C rows of the weight, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.accumulate import add_product_reference, add_product_wide
from megapar.core.device.dtypes import at_least_fp32


def small_embedding_reference(weight: Tensor, *, indices: Tensor) -> Tensor:
    """Look up indices [..] int64 in weight [C, H]. Returns [.., H]."""
    return F.embedding(indices, weight)


def small_embedding_by_product(weight: Tensor, *, indices: Tensor) -> Tensor:
    """Compute ``small_embedding_reference`` with a product for the gradient of the weight.

    On a GPU, torch sorts the indices in 14 kernels; this takes four. The product adds in fp32 and rounds once, too.
    """
    y: Tensor = _ByProduct.apply(weight, indices)
    return y


class _ByProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,), grad = ctx.saved_tensors, grads[0]
        rows = torch.arange(ctx.rows, device=indices.device)
        one_hot = grad.new_empty(indices.numel(), ctx.rows)
        torch.eq(indices.flatten().unsqueeze(-1), rows, out=one_hot)
        total = grad.new_empty(ctx.rows, grad.shape[-1], dtype=at_least_fp32(grad.dtype))
        add_product = add_product_wide if grad.is_cuda else add_product_reference
        add_product(total, one_hot.t(), grad.flatten(0, -2), begins=True)
        return total.to(grad.dtype), None
