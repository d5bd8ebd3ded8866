"""Dtypes of sums, wider than that of their terms, and matrix products that are accumulated in them.

Shape letters: M rows, K inner, N columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return max(fp32, dtype), which replaces fp32 in a run of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype of counts and sums over a global batch: fp64, as fp32 has too few integers; fp32 on Ascend."""
    return torch.float32 if device.type == "npu" else torch.float64


@dataclass(frozen=True)
class WeightProduct:
    """The product left [M, K] @ right [K, N], a weight's gradient: called for it, or added to a sum by its factors."""

    left: Tensor
    right: Tensor

    def __call__(self) -> Tensor:
        """Return the product in the dtype of its factors."""
        return self.left @ self.right


def add_product_reference(total: Tensor, a: Tensor, b: Tensor, *, begins: bool) -> Tensor:
    """Compute total [M, N] += a [M, K] @ b [K, N] in place; if ``begins``, overwrite ``total`` instead.

    If the dtypes are the same the product accumulates by itself. Otherwise it is rounded to its dtype first.
    """
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, beta=0.0 if begins else 1.0, out=total)
    return total.copy_(a @ b) if begins else total.add_(a @ b)


def add_product_wide(total: Tensor, a: Tensor, b: Tensor, *, begins: bool) -> Tensor:
    """Compute ``add_product_reference``, but accumulate 16-bit products in fp32 without rounding (torch on CUDA)."""
    if a.dtype == total.dtype or total.dtype != torch.float32:
        return add_product_reference(total, a, b, begins=begins)
    if begins:
        return torch.mm(a, b, out_dtype=torch.float32, out=total)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def wide_product_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return a [.., M, K] @ b [.., K, N] in max(fp32, dtype), not rounded to its dtype."""
    wide = at_least_fp32(a.dtype)
    return a.to(wide) @ b.to(wide)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``wide_product_reference`` from 16-bit factors by one kernel (torch on CUDA)."""
    if a.dtype.itemsize > 2:
        return a @ b
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
    return product.unflatten(0, a.shape[:-2])


def wide_product_rounded(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``wide_product_reference`` where products are rounded to the dtype of their factors."""
    return (a @ b).to(at_least_fp32(a.dtype))
