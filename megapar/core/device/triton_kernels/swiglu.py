"""Swiglu of rows, plain or clamped, multiplied by a weight per row if there are weights: one pass in each direction.

The clamped form is in fp32 and rounded once. Of the plain one every step is rounded to the dtype of the rows, in the
order of the operators that the kernels replace. The gradient of a weight is summed in fp32 by one program per row, so
that it repeats. Without weights, what is stored can be cast to fp8 in the same pass (``block_casts``).

Shape letters: R rows, F features.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megapar.core.device.triton_kernels.block_casts import cast_part

LARGEST_BLOCK = 1024
LIMIT, SLOPE = tl.constexpr(7.0), tl.constexpr(1.702)  # as in ``layer_ops.clamped_swiglu``
ELEMENTS_OF_A_WARP = 256  # eight of a thread: 16 bytes of a 16-bit dtype


@triton.jit
def _rounded(x, like):  # type: ignore[no-untyped-def]
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    rows, weights, result, values, scales, R, F: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    if weights is not None:
        weight = tl.load(weights + row).to(tl.float32)
        if not CLAMPED:
            weight = _rounded(weight, rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        if values is not None:
            inside = offsets < tl.where(row < R, F, 0)
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(gate, LIMIT)
            y = (tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0) * gate / (1.0 + tl.exp(-(gate * SLOPE)))
        else:
            y = _rounded(gate / (1.0 + tl.exp(-gate)), rows) * up
        if weights is not None:
            if not CLAMPED:
                y = _rounded(y, rows)
            y = y * weight
        tl.store(result + row * F + offsets, y.to(rows.dtype.element_ty), mask=inside)
        if values is not None:
            cast_part(_rounded(y, rows), values, scales, start, F, F, BLOCK)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, rows, weights, d_rows, d_weights, values, scales, R, F: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    place = d_rows + row * 2 * F
    total = tl.zeros((BLOCK,), tl.float32)
    if weights is not None:
        weight = tl.load(weights + row).to(tl.float32)
        if not CLAMPED:
            weight = _rounded(weight, rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        if values is not None:
            inside = offsets < tl.where(row < R, F, 0)
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + row * F + offsets, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            low, more = tl.minimum(gate, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0
            share = 1.0 / (1.0 + tl.exp(-(low * SLOPE)))
            activated = low * share
            if weights is not None:
                total += d * activated * more
                d = d * weight
            d_gate = tl.where(gate <= LIMIT, d * more * share * (1.0 + low * SLOPE * (1.0 - share)), 0.0)
            d_up = tl.where(tl.abs(up) <= LIMIT, d * activated, 0.0)
        else:
            share = 1.0 / (1.0 + tl.exp(-gate))
            activated = _rounded(gate / (1.0 + tl.exp(-gate)), rows)
            if weights is not None:
                total += d * _rounded(activated * up, rows)
                d = _rounded(d * weight, rows)
            d_gate = _rounded(d * up, rows) * share * (1.0 + gate * (1.0 - share))
            d_up = d * activated
        tl.store(place + offsets, d_gate.to(rows.dtype.element_ty), mask=inside)
        tl.store(place + F + offsets, d_up.to(rows.dtype.element_ty), mask=inside)
        if values is not None:
            cast_part(_rounded(d_gate, rows), values, scales, start, F, 2 * F, BLOCK)
            cast_part(_rounded(d_up, rows), values, scales, F + start, 2 * F, 2 * F, BLOCK)
    if weights is not None:
        tl.store(d_weights + row, tl.sum(total, 0).to(d_weights.dtype.element_ty))


Cast = tuple[Tensor, Tensor]


def swiglu(rows: Tensor, weights: Tensor | None, clamped: bool, result: Tensor, cast: Cast | None = None) -> None:
    """Compute silu(gate) * up, or the clamped swiglu, times the weights, [R, F].

    Args:
        rows: Gate, then up, [R, 2 F], contiguous, at most fp32.
        weights: [R], contiguous; None: no weights.
        cast: That of the result, [R', F] and [F / 128, R'], as of ``cast_rows``; None, or without weights.
    """
    R, F = rows.shape[0], rows.shape[1] // 2
    if R:
        grid, places = _places(R, cast)
        _forward[grid](rows, weights, result, *places, **_sizes(F), CLAMPED=clamped)


def swiglu_backward(
    dy: Tensor,
    rows: Tensor,
    weights: Tensor | None,
    clamped: bool,
    results: tuple[Tensor, Tensor],
    cast: Cast | None = None,
) -> None:
    """Compute the gradients of the rows, [R, 2 F], and of the weights, [R], which is empty without weights.

    dy: [R, F], contiguous, in the dtype of the rows. cast: That of the rows' gradient, as of ``swiglu``.
    """
    R, F = dy.shape
    if R:
        grid, places = _places(R, cast)
        _backward[grid](dy, rows, weights, *results, *places, **_sizes(F), CLAMPED=clamped)


def swiglu_cast(rows: Tensor, clamped: bool, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compute ``swiglu`` without weights, with its cast."""
    swiglu(rows, None, clamped, results[0], results[1:])


def swiglu_cast_backward(dy: Tensor, rows: Tensor, clamped: bool, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compute ``swiglu_backward`` without weights, with its cast."""
    swiglu_backward(dy, rows, None, clamped, (results[0], rows), results[1:])


def _places(R: int, cast: Cast | None) -> tuple[tuple[int], tuple[Any, ...]]:
    """Return the grid, and where the kernels store the cast."""
    return ((R,), (None, None, None)) if cast is None else ((cast[0].shape[0],), (*cast, R))


def _sizes(F: int) -> dict[str, int]:
    block = min(LARGEST_BLOCK, triton.next_power_of_2(F))
    return {"F": F, "BLOCK": block, "num_warps": max(1, block // ELEMENTS_OF_A_WARP)}
