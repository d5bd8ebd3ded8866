"""Products that are added to a wider sum.

Shape letters: M rows, K inner, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_product_reference(total: Tensor, a: Tensor, b: Tensor, *, begins: bool) -> Tensor:
    """total [M, N] (+)= a [M, K] @ b [K, N], in place. begins: what ``total`` holds does not count.

    In one dtype the product writes the sum itself; into a wider one it is rounded to its own dtype first.
    """
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, beta=0.0 if begins else 1.0, out=total)
    return total.copy_(a @ b) if begins else total.add_(a @ b)


def add_product_wide(total: Tensor, a: Tensor, b: Tensor, *, begins: bool) -> Tensor:
    """``add_product_reference``; from 16 bits to fp32 the product adds by itself, unrounded (torch has it for CUDA)."""
    if a.dtype == total.dtype or total.dtype != torch.float32:
        return add_product_reference(total, a, b, begins=begins)
    if begins:
        return torch.mm(a, b, out_dtype=torch.float32, out=total)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
