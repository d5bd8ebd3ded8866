"""Sums of 16-bit gradients in fp32, and gradients of gelu and layer norm that also sum their columns.

torch's copies between dtypes lack the loads of 16 bytes. The columns of a gradient sum to that of a bias: each program
sums those of some rows in fp32, its part, and a second kernel the parts in order, so that the result repeats.

Shape letters: R rows, F features, H hidden, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # eight elements of a thread
WARPS = 8
ROWS, TILE, COLUMNS = tl.constexpr(32), tl.constexpr(16), tl.constexpr(128)  # rows of a part
TILE_WARPS = 4
ELEMENTS_OF_A_WARP = 512  # of a row of a norm


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


@triton.jit
def _gelu(gradient, x, result, parts, R, F):  # type: ignore[no-untyped-def]
    part, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, ROWS, TILE):
        row = part * ROWS + start + tl.arange(0, TILE)[:, None]
        inside, at = (row < R) & (column < F)[None, :], row * F + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = 0.5 + 0.5 * tl.erf(value * 0.7071067811865476)
        slope += value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
        y = (tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * slope).to(result.dtype.element_ty)
        tl.store(result + at, y, mask=inside)
        total += y.to(tl.float32)
    tl.store(parts + part * F + column, tl.sum(total, 0), mask=column < F)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    gradient, x, mean, rstd, weight, kept, result, dropped, parts, R, scale, H: tl.constexpr, BLOCK: tl.constexpr
):
    part, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    within = column < H
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias, of_output = of_weight, of_weight
    for number in range(ROWS):
        row = part * ROWS + number
        inside, base, own = column < tl.where(row < R, H, 0), row * H, tl.minimum(row, R - 1)
        factor = tl.load(rstd + own)
        normal = (tl.load(x + base + column, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + own)) * factor
        normal = tl.where(inside, normal, 0.0)
        d = tl.load(gradient + base + column, mask=inside, other=0.0).to(tl.float32)
        of_weight += d * normal
        of_bias += d
        d *= tl.load(weight + column, mask=within, other=0.0).to(tl.float32)  # again: registers are scarce
        d -= normal * (tl.sum(d * normal, 0) / H) + tl.sum(d, 0) / H
        y = tl.where(inside, d * factor, 0.0).to(result.dtype.element_ty)
        tl.store(result + base + column, y, mask=inside)
        if kept is not None:
            factors = tl.load(kept + base + column, mask=inside, other=0).to(tl.float32) * scale
            y = (y.to(tl.float32) * factors).to(result.dtype.element_ty)
            tl.store(dropped + base + column, y, mask=inside)
        of_output += y.to(tl.float32)
    place = parts + part * 3 * H + column
    tl.store(place, of_weight, mask=within)
    tl.store(place + H, of_bias, mask=within)
    tl.store(place + 2 * H, of_output, mask=within)


@triton.jit
def _sum(parts, result, P, C):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, P, TILE):
        part = start + tl.arange(0, TILE)[:, None]
        inside = (part < P) & (column < C)[None, :]
        total += tl.load(parts + part.to(tl.int64) * C + column[None, :], mask=inside, other=0.0)
    tl.store(result + column, tl.sum(total, 0).to(result.dtype.element_ty), mask=column < C)


def gelu_backward(gradient: Tensor, x: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Compute the gradient of x [.., F] for that of gelu(x), and the sums of its columns [F]. All are contiguous."""
    R, F, (dx, total) = x.numel() // x.shape[-1], x.shape[-1], results
    parts = _parts(x, R, F)
    if R:
        _gelu[len(parts), triton.cdiv(F, COLUMNS.value)](gradient, x, dx, parts, R, F, num_warps=TILE_WARPS)
    _add_up(parts, total)


def norm_backward(gradient: Tensor, x: Tensor, *more: Any) -> None:
    """Compute the gradients [.., H] of a and b, and those of w, v and c, [3, H], in norm(a + dropout(b + c)).

    more: Mean and rstd [.., 1] of x = a + dropout(b + c) in fp32, w [H] of the norm, whose bias is v, what dropout
    keeps [.., H] and its factor, or None, and the results; without dropout one is for both. All are contiguous.
    """
    mean, rstd, weight, kept, scale, (dx, dropped, total) = more
    R, H = x.numel() // x.shape[-1], x.shape[-1]
    parts = _parts(x, R, total.numel())
    block, mask = triton.next_power_of_2(H), None if kept is None else kept.view(torch.uint8)
    if R:
        arguments = gradient, x, mean, rstd, weight, mask, dx, dropped, parts, R, scale, H, block
        _norm[(len(parts),)](*arguments, num_warps=max(1, block // ELEMENTS_OF_A_WARP))
    _add_up(parts, total)


def _parts(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(triton.cdiv(rows, ROWS.value), columns, dtype=torch.float32)


def _add_up(parts: Tensor, total: Tensor) -> None:
    P, C = parts.shape
    _sum[(triton.cdiv(C, COLUMNS.value),)](parts, total, P, C, num_warps=TILE_WARPS)
