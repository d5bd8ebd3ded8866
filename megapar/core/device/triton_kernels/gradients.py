"""Sums of 16-bit gradients in fp32, with loads of 16 bytes, which torch's copies between dtypes lack."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # eight elements of a thread
WARPS = 8


@triton.jit
def _add(total, gradient, N, total_stride, stride, BEGINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start, piece = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside, place = at < N - start, total + piece * total_stride + start + at
    x = tl.load(gradient + piece * stride + start + at, mask=inside, other=0.0).to(tl.float32)
    if not BEGINS:
        x += tl.load(place, mask=inside, other=0.0)
    tl.store(place, x, mask=inside)


def add_gradient(total: Tensor, gradient: Tensor, begins: bool) -> None:
    """Add a gradient [n, ..] to an fp32 sum of its shape in place, or copy it if it ``begins`` the sum.

    Each of the n pieces is contiguous.
    """
    if gradient.numel():
        size = gradient[0].numel()
        grid, strides = (triton.cdiv(size, BLOCK), gradient.shape[0]), (total.stride(0), gradient.stride(0))
        _add[grid](total, gradient, size, *strides, BEGINS=begins, BLOCK=BLOCK, num_warps=WARPS)
